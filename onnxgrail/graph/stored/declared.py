"""Weights that the graph computes: check that the file declares their shape."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxgrail.core import Refusal
from onnxgrail.graph.trace.facts import is_choice, key
from onnxgrail.graph.trace.flow import Flow

SMALL = 64  # elements of the largest tensor that may hold a target shape
UNKNOWN = (
    "the weight {} is computed in the graph and the file does not tell its shape; fold constants before compressing"
)


def freeze_undeclared(flow: Flow, model: ir.Model) -> None:
    """Freeze channels whose consumer has a computed weight with a shape that shape inference cannot find.

    The file alone does not tell which positions of such a weight belong to which channel.
    """
    plain = set(model.graph.initializers) | {key(n) for n in model.graph if n.op_type == "Constant"}
    plain |= flow.facts.stored.keys()
    computed = [use for use in flow.uses if use.role == "consumer" and use.value not in plain]
    if not computed:
        return
    known = _shapes(model, {use.value for use in computed})
    for use in computed:
        if known.get(use.value) != flow.facts.shapes[use.value]:
            reason = UNKNOWN.format(use.value)
            flow.labels.freeze(use.mark.labels.ravel(), Refusal(value=use.value, node=use.node, op="", reason=reason))


def _shapes(model: ir.Model, names: set[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that ONNX shape inference finds for computed values."""
    return {
        info.name: tuple(d.dim_value for d in info.type.tensor_type.shape.dim)
        for info in inferred(model)
        if info.name in names
    }


def inferred(model: ir.Model) -> Sequence[onnx.ValueInfoProto]:
    """Return the value infos that ONNX shape inference finds; empty if it fails on an operator."""
    try:
        proto = onnx.shape_inference.infer_shapes(without_weights(model))
    except Exception:  # noqa: BLE001  it raises many exception types
        return ()
    found: Sequence[onnx.ValueInfoProto] = proto.graph.value_info
    return found


def without_weights(model: ir.Model) -> onnx.ModelProto:
    """Return the graph with its large weights declared as inputs: only small tensors can affect shapes."""
    graph = onnx.GraphProto(name="shapes")
    graph.node.extend(ir.to_proto(node) for node in model.graph if not is_choice(node))
    for value in model.graph.inputs:
        if value.name not in model.graph.initializers:
            graph.input.append(ir.to_proto(value))
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.size <= SMALL:
            graph.initializer.extend([] if tensor is None else [ir.to_proto(tensor)])
        else:
            shape = list(tensor.shape.numpy())
            graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.dtype.value, shape))
    recorded = (
        v for node in model.graph for v in node.outputs if v.name and v.type is not None and v.shape is not None
    )
    graph.value_info.extend(ir.to_proto(value) for value in recorded)
    opsets = [onnx.helper.make_opsetid(d, v) for d, v in model.opset_imports.items()]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=max(model.ir_version, 4))
