"""Fold the scale of a layer's channels (LayerScale, Touvron et al. 2021) into the layer, as a change of basis needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.graph import slots
from onnxgrail.graph.rewrite.assign import set_operands
from onnxgrail.graph.rotate.layers import Slot, writing
from onnxgrail.graph.rotate.passing import Step, passed
from onnxgrail.graph.rotate.streams import Stream, Wall
from onnxgrail.graph.trace.facts import Facts, captures, constant_of


def fold_scales(graph: ir.Graph, streams: Iterable[Stream], facts: Facts) -> Facts | None:
    """Fold the scales of layers that write into streams, in place; return the new facts, None if there are none."""
    captured = {name for node in graph for name in captures(node)}
    folded = False
    for wall in (wall for stream in streams for wall in stream.walls if not wall.ahead):
        found = _scale(wall, facts)
        layer = None if found is None else _layer(found[0], wall.axis, facts, captured)
        if found is not None and layer is not None and wall.node is not None:
            facts, folded = _fold(graph, wall.node, (found[0], found[1]), layer, facts), True
    return facts if folded else None


def _scale(wall: Wall, facts: Facts) -> tuple[ir.Value, Array] | None:
    """Return the tensor that a wall multiplies by one constant per channel, and the constants."""
    node, value = wall.node, wall.value
    if node is None or node.op_type != "Mul" or value.is_graph_output():
        return None
    shape = facts.shapes[value.name or ""]
    for operand, other in ((0, 1), (1, 0)):
        source, scale = node.inputs[operand], node.inputs[other]
        if source is None or scale is None or scale.name not in facts.constants or source.name in facts.constants:
            continue
        vector = constant_of(scale, scale.name or "", facts)
        at = wall.axis - len(shape)
        fits = vector is not None and vector.size == shape[wall.axis] and vector.ndim >= -at
        if vector is not None and fits and vector.shape[at] == vector.size:
            return (source, vector.ravel()) if facts.shapes[source.name or ""] == shape else None
    return None


def _layer(value: ir.Value, axis: int, facts: Facts, captured: Collection[str]) -> list[Slot] | None:
    """Return all constants that are multiplied when a layer's result is; None if anything else reads them."""
    found: list[Slot] = []
    while len(value.uses()) == 1 and not value.is_graph_output() and value.name not in captured:
        node = value.producer()
        if node is None:
            return None
        weights = writing(node, axis, facts)
        if weights is not None:
            found += weights
            alone = all(len(slot.value.uses()) == 1 and slot.value.name not in captured for slot in found)
            return found if alone else None
        passing = passed(Step(node, None, axis, facts))
        ahead = [] if passing is None else [place for place in passing.tensors if place[0] not in node.outputs]
        if passing is None or len(ahead) != 1 or len(node.outputs) != 1:
            return None
        found += [Slot(node=node, operand=k, axis=at) for k, at in passing.constants]
        value, axis = ahead[0]
    return None


def _fold(
    graph: ir.Graph, node: ir.Node, scaled: tuple[ir.Value, Array], layer: Collection[Slot], facts: Facts
) -> Facts:
    source, vector = scaled
    shapes, dtypes, names = dict(facts.shapes), dict(facts.dtypes), set(facts.constants)
    for slot in layer:
        array = constant_of(slot.value, slot.value.name or "", facts)
        assert array is not None
        along = [-1 if axis == slot.axis % array.ndim else 1 for axis in range(array.ndim)]
        values = array.astype(np.result_type(array, np.float32)) * vector.reshape(along).astype(np.float32)
        limit = slots.largest(array.dtype)
        set_operands(graph, [(slot.node, slot.operand)], np.clip(values, -limit, limit).astype(array.dtype), ())
        name = slot.value.name or ""
        shapes[name], dtypes[name] = array.shape, array.dtype
        names.add(name)
    node.outputs[0].replace_all_uses_with(source)
    graph.remove(node, safe=True)
    return replace(facts, shapes=shapes, dtypes=dtypes, constants=frozenset(names))
