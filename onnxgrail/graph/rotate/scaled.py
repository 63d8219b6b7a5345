"""Fold what scales a layer's channels into the layer, as a change of basis needs: LayerScale, batch normalization.

LayerScale: Touvron et al. 2021, arXiv 2103.17239.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Floats
from onnxgrail.graph import slots
from onnxgrail.graph.attributes import integer, number
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.assign import set_operands, sweep
from onnxgrail.graph.rewrite.unique import hand_over
from onnxgrail.graph.rotate.layers import Slot, factor_of_bias, writing
from onnxgrail.graph.rotate.passing import Step, passed
from onnxgrail.graph.rotate.streams import Stream, Wall
from onnxgrail.graph.trace.facts import Facts, captures, constant_of, held

BIAS = 2  # operand of a convolution or a Gemm
EPSILON = 1e-5  # the default of BatchNormalization


@dataclass(frozen=True, slots=True, eq=False)
class _Scale:
    """A node that multiplies the channels of a tensor by constants, and adds others; `layer` makes the tensor."""

    node: ir.Node
    source: ir.Value
    factor: Floats
    shift: Floats | None
    layer: list[Slot]


def fold_scales(graph: ir.Graph, streams: Iterable[Stream], facts: Facts, *, whole: bool = False) -> Facts | None:
    """Fold the scales of layers that write into streams, in place; return the new facts, None if there are none.

    Args:
        graph: changed in place.
        streams: the streams.
        facts: of the graph.
        whole: leave streams alone that have walls of other kinds.
    """
    captured = {name for node in graph for name in captures(node)}
    found: dict[ir.Node, _Scale] = {}
    for stream in streams:
        scales = [_scale(wall, facts, captured) for wall in stream.walls]
        if not (whole and None in scales):
            found |= {scale.node: scale for scale in scales if scale is not None}
    for scale in found.values():
        facts = _fold(graph, scale, facts)
    return facts if found else None


def _scale(wall: Wall, facts: Facts, captured: Collection[str]) -> _Scale | None:
    """Return the scale that a wall is, if it can be folded."""
    node = wall.node
    if wall.ahead or node is None or wall.value.is_graph_output():
        return None
    found = _multiplied(node, wall, facts) if node.op_type == "Mul" else _normalized(node, wall, facts)
    if found is None:
        return None
    source, factor, shift = found
    layer = _layer(source, wall.axis, facts, captured)
    if not layer or (shift is not None and not _takes_shift(source, layer)):
        return None
    return _Scale(node, source, factor, shift, layer)


def _takes_shift(source: ir.Value, layer: Sequence[Slot]) -> bool:
    """Return True if what makes a tensor adds a constant, or can: then it also adds another one."""
    maker = source.producer()
    return maker is layer[0].node and maker.op_type in ("Conv", "Gemm", "Add") and factor_of_bias(maker) != 0


_Affine = tuple[ir.Value, Floats, Floats | None]
"""A tensor, and what its channels are multiplied by and what is added, (channels,) each."""


def _multiplied(node: ir.Node, wall: Wall, facts: Facts) -> _Affine | None:
    shape = facts.shapes[wall.value.name or ""]
    for operand, other in ((0, 1), (1, 0)):
        source, scale = node.inputs[operand], node.inputs[other]
        if source is None or scale is None or scale.name not in facts.constants or source.name in facts.constants:
            continue
        vector = constant_of(scale, scale.name or "", facts)
        at = wall.axis - len(shape)
        fits = vector is not None and vector.size == shape[wall.axis] and vector.ndim >= -at
        if vector is not None and fits and vector.shape[at] == vector.size:
            same = facts.shapes[source.name or ""] == shape
            return (source, np.asarray(vector.ravel(), np.float64), None) if same else None
    return None


def _normalized(node: ir.Node, wall: Wall, facts: Facts) -> _Affine | None:
    """Return what a batch normalization with fixed statistics does."""
    known = node.op_type == "BatchNormalization" and not node.domain and wall.axis == 1
    if not known or integer(node, "training_mode") or any(value.uses() for value in node.outputs[1:]):
        return None
    source, vectors = node.inputs[0], [constant_of(v, v.name or "", facts) for v in node.inputs[1:5] if v is not None]
    width = facts.shapes[wall.value.name or ""][1]
    if source is None or len(vectors) != 4 or any(v is None or v.shape != (width,) for v in vectors):
        return None
    gain, shift, mean, variance = (np.asarray(v, np.float64) for v in vectors)
    factor = gain / np.sqrt(variance + number(node, "epsilon", EPSILON))
    return source, factor, shift - mean * factor


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


def _fold(graph: ir.Graph, scale: _Scale, facts: Facts) -> Facts:
    shapes, dtypes, names = dict(facts.shapes), dict(facts.dtypes), set(facts.constants)
    dtype = facts.dtypes[scale.layer[0].value.name or ""]
    shift = None if scale.shift is None else scale.shift / factor_of_bias(scale.layer[0].node)
    for slot in scale.layer:
        array = held(slot.value, facts)
        along = [-1 if axis == slot.axis % array.ndim else 1 for axis in range(array.ndim)]
        values = array * scale.factor.reshape(along)
        if shift is not None and (slot.operand == BIAS or slot.node.op_type == "Add"):
            values, shift = values + shift.reshape(along), None
        sweep(graph, set_operands(graph, [(slot.node, slot.operand)], slots.clamped(values, array.dtype), ()))
        name = slot.value.name or ""
        shapes[name], dtypes[name] = array.shape, array.dtype
        names.add(name)
    if shift is not None:
        bias = _with_bias(graph, scale, slots.clamped(shift, dtype))
        shapes[bias], dtypes[bias] = shift.shape, dtype
        names.add(bias)
    out = scale.node.outputs[0]
    out.replace_all_uses_with(scale.source)
    read = [value for value in scale.node.inputs if value is not None]
    graph.remove(scale.node, safe=True)
    sweep(graph, [value for value in read if value is not scale.source])
    hand_over(graph, out, scale.source)
    return replace(facts, shapes=shapes, dtypes=dtypes, constants=frozenset(names))


def _with_bias(graph: ir.Graph, scale: _Scale, numbers: Array) -> str:
    """Add a bias to the layer; return its name."""
    node = scale.layer[0].node
    bias = constant(graph, numbers, f"{scale.source.name}/shift")
    node.resize_inputs(BIAS + 1)
    node.replace_input_with(BIAS, bias)
    return bias.name or ""
