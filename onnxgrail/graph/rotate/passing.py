"""Operators that residual streams or channels inside heads pass: what they do is the same in any basis."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Ints
from onnxgrail.graph.attributes import LAYOUTS, given, integer, integers, name_of, names_of, number, text
from onnxgrail.graph.products import is_fused
from onnxgrail.graph.rotate.classes import alike_inside
from onnxgrail.graph.trace.facts import Facts, constant_of, key
from onnxgrail.graph.trace.flow import Flow, Use

MOVES = LAYOUTS | {"Expand", "Shape", "Size", "Cast", "CastLike", "Split", "Slice", "Concat", "Gather"}
LAYERS = frozenset(("MatMul", "Gemm", "Conv"))

Place = tuple[ir.Value, int]
"""A tensor and its channel axis."""


@dataclass(frozen=True, slots=True, eq=False)
class Passing:
    """The tensors of one node that carry the channels of a stream.

    Attributes:
        tensors: activations with their channel axes.
        constants: (operand, channel axis) of constants; they are vectors of the stream too.
    """

    tensors: tuple[Place, ...]
    constants: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A node that is entered through one of its tensors.

    Attributes:
        node: the node.
        operand: the input through which it is entered, None if through its output.
        axis: channel axis of that tensor.
        facts: shapes.
    """

    node: ir.Node
    operand: int | None
    axis: int
    facts: Facts

    @property
    def width(self) -> int:
        """Return the number of channels."""
        value = self.node.outputs[0] if self.operand is None else self.node.inputs[self.operand]
        return self.shape(value)[self.axis]

    def shape(self, value: ir.Value | None) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.facts.shapes.get(value.name or "", ()) if value is not None else ()

    def passing(self, pairs: Sequence[tuple[int, int]], out: int, outputs: int = 1) -> Passing:
        """Return the tensors for (operand, axis) pairs and the axis of the outputs."""
        tensors: list[Place] = [(value, out) for value in self.node.outputs[:outputs]]
        constants = []
        for operand, axis in pairs:
            value = given(self.node, operand)
            if value.name in self.facts.constants:
                constants.append((operand, axis))
            else:
                tensors.append((value, axis))
        return Passing(tuple(tensors), tuple(constants))


def passed(step: Step) -> Passing | None:
    """Return the tensors of a node that carry the same channels in the same basis; None if it mixes or bends them."""
    if step.node.domain:
        return None
    function = _PASSES.get(step.node.op_type)
    found = None if function is None else function(step)
    if found is None:
        return None
    width = step.width
    sizes = [step.shape(value)[axis : axis + 1] for value, axis in found.tensors]
    sizes += [step.shape(step.node.inputs[operand])[axis : axis + 1] for operand, axis in found.constants]
    return found if all(size == (width,) for size in sizes) else None


def _same(step: Step) -> Passing | None:
    return step.passing([(0, step.axis)], step.axis) if step.operand in (0, None) else None


def _transpose(step: Step) -> Passing | None:
    rank = len(step.shape(step.node.inputs[0]))
    order = integers(step.node, "perm", range(rank)[::-1])
    inward = order[step.axis] if step.operand is None else step.axis
    return step.passing([(0, inward)], order.index(inward))


def _reshape(step: Step) -> Passing | None:
    if step.operand not in (0, None):
        return None
    before, after = step.shape(step.node.inputs[0]), step.shape(step.node.outputs[0])
    if step.operand is None:
        inward = _moved(after, before, step.axis)
        return None if inward is None else step.passing([(0, inward)], step.axis)
    out = _moved(before, after, step.axis)
    return None if out is None else step.passing([(0, step.axis)], out)


def _moved(before: Sequence[int], after: Sequence[int], axis: int) -> int | None:
    """Return the axis of `after` that holds the positions of an axis of `before`, in the same order; None if none."""
    ahead = math.prod(before[:axis])
    at = (a for a, size in enumerate(after) if size == before[axis] and math.prod(after[:a]) == ahead)
    return next(at, None)


def _expand(step: Step) -> Passing | None:
    if step.operand not in (0, None):
        return None
    offset = len(step.shape(step.node.outputs[0])) - len(step.shape(step.node.inputs[0]))
    inward = step.axis - offset if step.operand is None else step.axis
    return step.passing([(0, inward)], inward + offset) if inward >= 0 else None


def _concat(step: Step) -> Passing | None:
    rank = len(step.shape(step.node.outputs[0]))
    if integer(step.node, "axis") % rank == step.axis:
        return None
    return step.passing([(k, step.axis) for k in range(len(step.node.inputs))], step.axis)


def _split(step: Step) -> Passing | None:
    rank = len(step.shape(step.node.outputs[0]))
    if step.operand not in (0, None) or integer(step.node, "axis") % rank == step.axis:
        return None
    return step.passing([(0, step.axis)], step.axis, len(step.node.outputs))


def _slice(step: Step) -> Passing | None:
    rank = len(step.shape(step.node.inputs[0]))
    value = step.facts.values.get(name_of(step.node, 3))
    if value is None and name_of(step.node, 3):
        return None
    axes = integers(step.node, "axes", range(rank)) if value is None else tuple(int(a) for a in value.ravel())
    return _same(step) if step.axis not in [a % rank for a in axes] else None


def _gather(step: Step) -> Passing | None:
    if step.operand not in (0, None):
        return None
    rank = len(step.shape(step.node.inputs[0]))
    along = integer(step.node, "axis") % rank
    more = len(step.shape(step.node.inputs[1])) - 1
    inward = step.axis
    if step.operand is None:
        if along <= step.axis <= along + more:
            return None
        inward = step.axis if step.axis < along else step.axis - more
    if inward == along:
        return None
    return step.passing([(0, inward)], inward if inward < along else inward + more)


def _broadcast(step: Step) -> tuple[int, list[tuple[int, int]], list[int]] | None:
    """Return the channel axis of the output, the operands that have it with their axes, and the other operands."""
    rank = len(step.shape(step.node.outputs[0]))
    inputs = [value for value in step.node.inputs if value is not None]
    if len(inputs) != len(step.node.inputs):
        return None
    out = step.axis
    if step.operand is not None:
        out += rank - len(step.shape(inputs[step.operand]))
    mine, others = [], []
    for operand, value in enumerate(inputs):
        shape = step.shape(value)
        axis = out - (rank - len(shape))
        if axis >= 0 and shape[axis] != 1:
            mine.append((operand, axis))
        else:
            others.append(operand)
    return out, mine, others


def _sum(step: Step) -> Passing | None:
    found = _broadcast(step)
    if found is None or not all(is_zero(step.node, operand, step.facts) for operand in found[2]):
        return None
    return step.passing(found[1], found[0])


def is_zero(node: ir.Node, operand: int, facts: Facts) -> bool:
    """Return True if an operand is a constant of zeros (scales of PaddlePaddle add one)."""
    value = node.inputs[operand]
    array = constant_of(value, value.name or "", facts) if value is not None else None
    return array is not None and not array.any()


def _scaled(step: Step) -> Passing | None:
    found = _broadcast(step)
    if found is None or len(found[1]) != 1 or (step.node.op_type == "Div" and found[1][0][0] != 0):
        return None
    return step.passing(found[1], found[0])


def _where(step: Step) -> Passing | None:
    found = _broadcast(step)
    if found is None or 0 not in found[2] or not all(k == 0 or is_zero(step.node, k, step.facts) for k in found[2]):
        return None
    return step.passing(found[1], found[0])


def _mixed_rows(step: Step) -> Passing | None:
    """Pass the second operand of a product that mixes its rows."""
    right = step.node.inputs[1]
    last = len(step.shape(right)) - 1
    if right is None or right.name in step.facts.constants or last < 1 or step.operand == 0:
        return None
    out = len(step.shape(step.node.outputs[0])) - 1
    return step.passing([(1, last)], out) if step.axis == (out if step.operand is None else last) else None


def _reduced(step: Step) -> Passing | None:
    rank = len(step.shape(step.node.inputs[0]))
    value = step.facts.values.get(name_of(step.node, 1))
    axes = integers(step.node, "axes") if value is None else tuple(int(a) for a in value.ravel())
    gone = sorted(a % rank for a in axes)
    if not gone or step.operand not in (0, None):
        return None
    kept = range(rank) if integer(step.node, "keepdims", 1) else [a for a in range(rank) if a not in gone]
    inward = kept[step.axis] if step.operand is None else step.axis
    return None if inward in gone else step.passing([(0, inward)], kept.index(inward))


def _pooled(step: Step) -> Passing | None:
    return _same(step) if step.axis == 1 else None


_PASSES: dict[str, Callable[[Step], Passing | None]] = {
    **dict.fromkeys(("Identity", "Cast", "Dropout", "Neg"), _same),
    "Transpose": _transpose,
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshape),
    "Expand": _expand,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    **dict.fromkeys(("Add", "Sub", "Sum"), _sum),
    **dict.fromkeys(("Mul", "Div"), _scaled),
    "Where": _where,
    "MatMul": _mixed_rows,
    **dict.fromkeys(("ReduceMean", "ReduceSum"), _reduced),
    **dict.fromkeys(("AveragePool", "GlobalAveragePool"), _pooled),
}


@dataclass(frozen=True, slots=True, eq=False)
class Channels:
    """Channels inside heads, as one operand of a product reads them.

    Attributes:
        flow: the trace.
        names: tensors with the channels.
        uses: constants with the channels.
        rows: (heads, channels) label classes.
        picked: they keep their basis and are picked, so each may be scaled in its own way.
    """

    flow: Flow
    names: Collection[str]
    uses: Sequence[Use]
    rows: Ints
    picked: bool


def bends(node: ir.Node, channels: Channels) -> bool:
    """Return True if the result of a node that reads or computes some channels depends on their basis."""
    if not node.domain and (node.op_type in MOVES or _adds_zeros(node, channels)):
        return False
    linear = (node.op_type in LAYERS or is_fused(node)) and integer(node, "group", 1) == 1
    if linear and any(use.node == key(node) for use in channels.uses):
        return False
    others = [k for k, v in enumerate(node.inputs) if v is not None and v.name not in channels.names]
    if node.op_type in ("Add", "Sub"):
        added = {use.operand for use in channels.uses if use.node == key(node)}
        return not all(k in added or is_zero(node, k, channels.flow.facts) for k in others)
    scales = node.op_type in ("Mul", "Neg") or (node.op_type == "Div" and others == [1])
    return not scales or len(others) != (node.op_type != "Neg") or not _scales_alike(node, others, channels)


def _adds_zeros(node: ir.Node, channels: Channels) -> bool:
    """Return True for a Pad that adds zeros, or repeats what is there."""
    if node.op_type != "Pad":
        return False
    given = is_zero(node, 2, channels.flow.facts) if name_of(node, 2) else not number(node, "value")
    return given or text(node, "mode", "constant") != "constant"


def _scales_alike(node: ir.Node, others: Sequence[int], channels: Channels) -> bool:
    """Return True if a node multiplies all channels of a head by one number, which may differ between heads."""
    shapes, labels = channels.flow.facts.shapes, channels.flow.labels
    given = [shapes.get(names_of(node.inputs)[k], (0,)) for k in others]
    if channels.picked and all(math.prod(shape) == 1 for shape in given):
        return True
    rank = len(shapes.get(key(node), ()))
    varies = {rank - k for shape in given for k, size in enumerate(shape[::-1], 1) if size != 1}
    found = [(labels.find(mark.labels), mark) for mark in channels.flow.marks.get(key(node), ())]
    mine = [(table, mark) for table, mark in found if np.isin(table, channels.rows).any()]
    apart = [[mark.along(axis) for axis in mark.axes if axis in varies] for _, mark in mine]
    return bool(mine) and all(alike_inside(t, axes, channels.rows) for (t, _), axes in zip(mine, apart, strict=True))
