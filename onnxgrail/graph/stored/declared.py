"""Weights that the graph computes: which of their shapes the file declares, and the stored numbers of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.core import Ints, Refusal
from onnxgrail.graph.attributes import LAYOUTS, given, integers
from onnxgrail.graph.stored.integers import Member
from onnxgrail.graph.trace.facts import Facts, is_choice, key
from onnxgrail.graph.trace.flow import Flow

SMALL = 64  # elements of the largest tensor that may hold a target shape
UNKNOWN = (
    "the weight {} is computed in the graph and the file does not tell its shape; fold constants before compressing"
)


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """A weight with the numbers of one stored array in another order or shape.

    Attributes:
        name: of the weight; origin: of the stored array; shape: of the stored array.
        index: position in the flat stored array of every number of the weight.
    """

    name: str
    origin: str
    shape: tuple[int, ...]
    index: Ints

    def members(self, axis: int, positions: Ints) -> list[Member]:
        """Return the stored array that loses all other positions; the weight itself if they lie on no axis of it."""
        lost = np.delete(self.index, positions, axis=axis).ravel()
        places = np.unravel_index(lost, self.shape)
        for stored, size in enumerate(self.shape):
            gone = np.unique(places[stored])
            if lost.size and gone.size * (self.index.size // size) == lost.size:
                return [Member(self.origin, stored, np.setdiff1d(np.arange(size), gone))]
        return [Member(self.name, axis, positions)]


def freeze_undeclared(flow: Flow, model: ir.Model) -> None:
    """Freeze channels whose consumer has a computed weight with a shape that nothing in the file tells.

    The file alone does not tell which positions of such a weight belong to which channel.
    """
    names = {use.value for use in flow.uses if use.role == "consumer"}
    missing = _undeclared(model, flow.facts, names - laid_out(model, flow.facts, names).keys())
    for use in flow.uses:
        if use.role == "consumer" and use.value in missing:
            reason = UNKNOWN.format(use.value)
            flow.labels.freeze(use.mark.labels.ravel(), Refusal(value=use.value, node=use.node, op="", reason=reason))


def laid_out(model: ir.Model, facts: Facts, names: Iterable[str]) -> dict[str, LaidOut]:
    """Return those weights that are one stored array, which nothing else reads, laid out anew.

    Args:
        model: the graph.
        facts: shapes of its tensors.
        names: of weights.
    """
    computed = set(names) - facts.stored.keys() - set(model.graph.initializers)
    found: dict[str, LaidOut] = {}
    for node in model.graph if computed else ():
        if key(node) not in computed:
            continue
        value, moves = node.outputs[0], list[ir.Node]()
        maker: ir.Node | None = node
        while maker is not None and maker.op_type in LAYOUTS and len(given(maker, 0).uses()) == 1:
            moves.append(maker)
            value = given(maker, 0)
            maker = value.producer()
        tensor = value.const_value
        if moves and maker is None and tensor is not None:
            shape = tuple(tensor.shape.numpy())
            found[key(node)] = LaidOut(key(node), value.name or "", shape, _moved(shape, moves[::-1], facts))
    return found


def _moved(shape: tuple[int, ...], moves: Sequence[ir.Node], facts: Facts) -> Ints:
    """Return the positions in a flat array of this shape, moved as its numbers are."""
    index = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    for node in moves:
        if node.op_type == "Transpose":
            index = index.transpose(integers(node, "perm", range(index.ndim)[::-1]))
        else:
            index = index.reshape(facts.shapes[key(node)])
    return index


def _undeclared(model: ir.Model, facts: Facts, names: set[str]) -> set[str]:
    """Return the names of computed weights whose shape ONNX shape inference cannot find."""
    plain = set(model.graph.initializers) | {key(n) for n in model.graph if n.op_type == "Constant"}
    computed = names - plain - facts.stored.keys()
    known = _shapes(model, computed) if computed else {}
    return {name for name in computed if known.get(name) != facts.shapes[name]}


def _shapes(model: ir.Model, names: set[str]) -> Mapping[str, tuple[int, ...]]:
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
