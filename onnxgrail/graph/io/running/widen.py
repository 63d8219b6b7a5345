"""Convert bfloat16 graphs to float32 for running and measuring: ONNX Runtime has no bfloat16 CPU kernels.

Weights stay bfloat16, in their file, each followed by a Cast, so that only the weights one session reads are ever wide.
All other tensors become float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.graph.io.soundness import bodies
from onnxgrail.graph.stored.declared import inferred

NARROW, WIDE = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
_TYPED = frozenset({"to", "dtype", "output_dtype", "stash_type"})  # attributes that name an element type


def has_bfloat16(model: ir.Model) -> bool:
    """Return True if a graph has a bfloat16 input, output, weight or node attribute."""
    kind = ir.DataType.BFLOAT16
    if any(v.dtype == kind for v in (*model.graph.inputs, *model.graph.outputs)):
        return True
    if any(v.const_value is not None and v.const_value.dtype == kind for v in model.graph.initializers.values()):
        return True
    return any(
        a.type == ir.AttributeType.INT and a.value == kind.value
        for node in model.graph
        for name, a in node.attributes.items()
        if name in _TYPED
    )


def widen(proto: onnx.ModelProto) -> None:
    """Convert bfloat16 tensors to float32, in place; weights keep their numbers and get a Cast."""
    _graph(proto.graph)
    for function in proto.functions:
        nodes = _nodes(function.node)
        del function.node[:]
        function.node.extend(nodes)


def true_types(model: ir.Model) -> dict[str, np.dtype]:
    """Return the dtypes of tensors that shape inference finds to be bfloat16, which a widened run shows as float32."""
    narrow = ir.DataType.BFLOAT16.numpy()
    return {info.name: narrow for info in inferred(model) if info.type.tensor_type.elem_type == NARROW}


def wide(array: Array) -> Array:
    """Return a bfloat16 array as float32, which the runtime accepts; other arrays unchanged."""
    return array.astype(np.float32) if getattr(array, "dtype", None) == ir.DataType.BFLOAT16.numpy() else array


def _graph(graph: onnx.GraphProto) -> None:
    casts: dict[str, onnx.NodeProto] = {}
    inputs = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if tensor.data_type == NARROW:
            name, tensor.name = tensor.name, f"{tensor.name}/bfloat16"
            if name in inputs:
                graph.input.remove(next(value for value in graph.input if value.name == name))
            casts[name] = _cast(tensor.name, name)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == NARROW:
            value.type.tensor_type.elem_type = WIDE
    nodes = []
    for node in _nodes(graph.node):  # cast each weight just before its first reader, not all at the start
        nodes += [casts.pop(name) for name in sorted(_read(node)) if name in casts]
        nodes.append(node)
    nodes += casts.values()  # weights without readers, or outputs themselves
    del graph.node[:]
    graph.node.extend(nodes)


def _nodes(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    found = []
    for node in nodes:
        rounds = False
        for attribute in node.attribute:
            if attribute.name in _TYPED and attribute.i == NARROW:
                rounds = node.op_type == "Cast"
                attribute.i = NARROW if rounds else WIDE
            if attribute.HasField("t") and attribute.t.data_type == NARROW:
                array = onnx.numpy_helper.to_array(attribute.t).astype(np.float32)
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(array, attribute.t.name))
            for body in bodies(attribute):
                _graph(body)
        found.append(node)
        if rounds:  # the model rounds to bfloat16 here; continue in float32
            name = node.output[0]
            node.output[0] = f"{name}/bfloat16"
            found.append(_cast(node.output[0], name))
    return found


def _read(node: onnx.NodeProto) -> set[str]:
    """Return the names that a node or its bodies read."""
    names = set(node.input)
    for attribute in node.attribute:
        for body in bodies(attribute):
            names |= {value.name for value in body.output}.union(*map(_read, body.node))
    return names


def _cast(source: str, target: str) -> onnx.NodeProto:
    return onnx.helper.make_node("Cast", [source], [target], name=f"{target}/wide", to=WIDE)
