"""Compute what a graph makes of the shapes of its own weights, as tf2onnx writes the weights of `Einsum` layers.

The legacy exporter of torch computes which rows of a weight make keys and values from the width of what they read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.convenience import get_const_tensor

from onnxgrail.core import Array
from onnxgrail.graph.attributes import is_read, numbers_of
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.sizes import reported

SMALL = 64  # elements of the largest tensor that counts as sizes
Known = dict[ir.Value, Array]


class LeftOut(NamedTuple):
    """Stored arrays of which only the shape was read.

    Attributes:
        arrays: how many.
        numbers: their numbers; bytes: size of these.
    """

    arrays: int
    numbers: int
    bytes: int


NO_ARRAYS = LeftOut(0, 0, 0)


def compute_known(model: ir.Model) -> LeftOut:
    """Replace integers that are computed from shapes of stored arrays, and from constants, by their values, in place.

    Outputs of the model stay what nodes compute.  Only shapes of arrays with at most one reader count: of others, two
    readers may lose different channels, and then the file would not tell which positions those are.

    Returns:
        The arrays that are removed, because only their shape was read.
    """
    known: Known = {}
    gone: list[Array] = []
    for maker in model.graph:
        array = _computed(model, maker, known)
        if array is not None and array.dtype.kind == "i" and array.size <= SMALL:
            known[maker.outputs[0]] = array
    for value, array in reversed(known.items()):
        node = value.producer()
        if node is None or value.is_graph_output():
            continue
        if value.uses():
            model.graph.initializers[value.name or ""] = _stored(value, array)
        inputs = dict.fromkeys(node.inputs)
        model.graph.remove(node, safe=True)
        for source in inputs:
            if source is not None and source.is_initializer() and not is_read(source):
                gone += [numbers_of(source)] if node.op_type == "Shape" else []
                del model.graph.initializers[source.name or ""]
    return LeftOut(len(gone), sum(array.size for array in gone), sum(array.nbytes for array in gone))


def store_parts(model: ir.Model, facts: Facts) -> bool:
    """Store parts of weights whose bounds come from sizes that no input of the model changes, in place.

    Args:
        model: the graph.
        facts: sizes and small integers of a run.

    Returns:
        True if there are any.
    """
    found = False
    for node in list(model.graph) if _all_varied(model, facts) else ():
        data, value = node.inputs[0] if node.inputs else None, node.outputs[0]
        computed = node.op_type == "Slice" and not node.domain and value.name not in facts.constants
        if not computed or data is None or not _is_weight(data) or facts.varying.get(value.name or ""):
            continue
        feed = {v.name or "": facts.values.get(v.name or "") for v in node.inputs[1:] if v is not None}
        feed |= {v.name or "": numbers_of(v) for v in node.inputs if v is not None and v.const_value is not None}
        array = None if any(one is None for one in feed.values()) else _run(model, node, feed)
        if array is None or array.shape != facts.shapes.get(value.name or "") or value.is_graph_output():
            continue
        model.graph.initializers[value.name or ""] = _stored(value, array)
        model.graph.remove(node, safe=True)
        if not is_read(data):
            del model.graph.initializers[data.name or ""]
        found = True
    return found


def _all_varied(model: ir.Model, facts: Facts) -> bool:
    """Return True if a run has shown what every open size of the inputs changes."""
    other = facts.other or {}
    shapes = [(v.name or "", v.shape) for v in model.graph.inputs if v.shape is not None and v.name in facts.shapes]
    axes = [(name, axis) for name, shape in shapes for axis, size in enumerate(shape) if not isinstance(size, int)]
    return all(name in other and other[name].shape[axis] != facts.shapes[name][axis] for name, axis in axes)


def _is_weight(value: ir.Value) -> bool:
    inside = value.is_initializer() and not value.is_graph_input() and value.const_value is not None
    return inside and value.const_value is not None and value.const_value.dtype.is_floating_point()


def _stored(value: ir.Value, array: Array) -> ir.Value:
    """Return a constant that takes the place of a computed value."""
    fresh = ir.Value(name=value.name, const_value=ir.tensor(array, name=value.name))
    fresh.shape, fresh.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.from_numpy(array.dtype))
    value.replace_all_uses_with(fresh)
    return fresh


def _computed(model: ir.Model, node: ir.Node, known: Known) -> Array | None:
    """Return the output of a node that computes with shapes of stored arrays; None for any other node."""
    inputs = [value for value in node.inputs if value is not None]
    if node.domain or len(node.outputs) != 1 or not inputs:
        return None
    if node.op_type == "Shape" and inputs[0].is_initializer() and not inputs[0].is_graph_input():
        sole = sum(use.node.op_type != "Shape" for use in inputs[0].uses()) <= 1
        tensor = get_const_tensor(inputs[0]) if sole else None
        return None if tensor is None else reported(node, tuple(tensor.shape.numpy()))
    if known.keys().isdisjoint(inputs):
        return None
    feed = {value.name or "": _small(value, known) for value in inputs}
    return None if any(array is None for array in feed.values()) else _run(model, node, feed)


def _small(value: ir.Value, known: Known) -> Array | None:
    """Return a known or stored array of few numbers."""
    tensor = None if value.is_graph_input() else get_const_tensor(value)
    return known.get(value) if tensor is None or tensor.size > SMALL else tensor.numpy()


def _run(model: ir.Model, node: ir.Node, feed: dict[str, Array | None]) -> Array | None:
    """Return the output of a node; None if it does not compute one array."""
    from onnx.reference import ReferenceEvaluator  # slow to import, and few models need it

    names = [onnx.ValueInfoProto(name=name) for name in feed]
    graph = onnx.helper.make_graph(
        [ir.to_proto(node)], "known", names, [onnx.ValueInfoProto(name=node.outputs[0].name)]
    )
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    try:
        (found,) = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets)).run(None, feed)
    except Exception:  # noqa: BLE001  it raises many exception types; the node stays
        return None
    return found if isinstance(found, np.ndarray) else None
