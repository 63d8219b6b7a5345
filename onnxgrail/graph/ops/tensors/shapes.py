"""Rewrites of shape operands: targets of Reshape and Expand, bounds of Slice.

A constant operand is replaced by the node's own copy.  A computed operand stays computed: the changed sizes are written
over it, so dimensions that depend on the input still do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Bools, Ints
from onnxgrail.errors import RewriteError
from onnxgrail.graph.attributes import integer, integers
from onnxgrail.graph.ops.rule import narrow
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.ops.tensors.layout import bounds_of
from onnxgrail.graph.trace.sizes import slice_of

Step = tuple[str, Callable[[ir.Value], Sequence[ir.Value | Array]]]


@narrow("Reshape")
def narrow_reshape(cut: Cut) -> None:
    """Update the target shape; keep -1 and copied dimensions if they are still right."""
    known = cut.facts.values.get(cut.input_name(1))
    stays = cut.alive(cut.output_name())
    if known is None or not stays:
        return
    target = known.ravel().astype(np.int64)
    copies = not integer(cut.node, "allowzero")
    inner = cut.alive(cut.input_name(0))
    before = cut.shape(cut.input_name(0))
    change = np.zeros(len(target), dtype=bool)
    sizes = target.copy()
    for axis, kept in stays.items():
        count = int(kept.sum())
        if target[axis] == -1:
            continue
        if target[axis] == 0 and copies and axis < len(before):
            copied = int(inner[axis].sum()) if axis in inner else before[axis]
            if copied == count:
                continue
        change[axis], sizes[axis] = True, count
    for axis in np.flatnonzero((target == 0) & ~change).tolist() if copies else ():
        if axis in inner and axis not in stays:
            change[axis], sizes[axis] = True, cut.shape(cut.output_name())[axis]
    _lay_over(cut, change, sizes)


@narrow("Squeeze")
def narrow_squeeze(cut: Cut) -> None:
    """Name the axes explicitly, so that an axis with one kept position is not dropped."""
    if "axes" in cut.node.attributes or cut.input_name(1):
        return
    axes = [axis for axis, size in enumerate(cut.shape(cut.input_name(0))) if size == 1]
    if cut.version < 13:
        cut.node.attributes["axes"] = ir.AttrInt64s("axes", axes)
    else:
        cut.set_operand(1, np.array(axes, dtype=np.int64), "axes")


@narrow("Expand")
def narrow_expand(cut: Cut) -> None:
    """Update the target shape."""
    known = cut.facts.values.get(cut.input_name(1))
    if known is None:
        return
    target = known.ravel().astype(np.int64)
    offset = len(cut.shape(cut.output_name())) - len(target)
    change = np.zeros(len(target), dtype=bool)
    sizes = target.copy()
    for axis, kept in cut.alive(cut.output_name()).items():
        if axis >= offset and target[axis - offset] > 1:
            change[axis - offset], sizes[axis - offset] = True, int(kept.sum())
    _lay_over(cut, change, sizes)


def _lay_over(cut: Cut, change: Bools, sizes: Ints) -> None:
    """Write the changed sizes into operand 1.

    A computed size that is not right without a correction is the full one; it is scaled, so that a head axis merged
    with the batch still follows the batch.
    """
    name = cut.input_name(1)
    if name in cut.facts.constants:
        if change.any():
            cut.set_operand(1, sizes, "shape")
        return
    right = cut.sizes.right.get(cut.output_name())
    change = change if right is None else change & ~right
    if not change.any():
        return
    whole = np.array(cut.shape(cut.output_name()))[-len(sizes) :]
    for op, inputs in _in_proportion(np.where(change, sizes, 1), np.where(change, whole, 1)):
        cut.compute_operand(1, op, inputs(cut.operand(1)), op)


def _in_proportion(part: Ints, whole: Ints) -> list[Step]:
    """Return steps that scale sizes elementwise by part / whole."""
    shared = np.gcd(part, whole)
    return [("Mul", lambda v: [v, part // shared]), ("Div", lambda v: [v, whole // shared])]


@narrow("Shape", "Size")
def narrow_shape(cut: Cut) -> None:
    """Scale back to the full size if the shape arithmetic needs it."""
    if cut.output_name() not in cut.sizes.staying:
        return
    name = cut.input_name(0)
    before, stays = cut.shape(name), cut.alive(name)
    count = [int(stays[axis].sum()) if axis in stays else size for axis, size in enumerate(before)]
    if cut.node.op_type == "Size":
        full, left = np.array(math.prod(before)), np.array(math.prod(count))
    else:
        start, end = slice_of(cut.node, len(before))
        full, left = np.array(before[start:end]), np.array(count[start:end])
    if (full != left).any():
        cut.correct_output(_in_proportion(full, left))


@narrow("DynamicSlice", "Slice")
def narrow_slice(cut: Cut) -> None:
    """Recompute bounds on narrowed axes; gather positions of a slice with steps."""
    stays = cut.alive(cut.input_name(0))
    if not stays:
        return
    if "starts" in cut.node.attributes:
        _narrow_attributes(cut, stays)
        return
    names = [cut.input_name(k) for k in range(1, 5)]
    values = [cut.facts.values.get(n) if n else None for n in names]
    if values[0] is None or values[1] is None:
        raise RewriteError(f"Slice {cut.output_name()} has bounds that are not known")
    ranges = bounds_of(len(cut.shape(cut.input_name(0))), values)
    change = np.zeros(len(ranges), dtype=bool)
    starts = values[0].ravel().astype(np.int64).copy()
    ends = values[1].ravel().astype(np.int64).copy()
    for position, (axis, bounds) in enumerate(ranges.items()):
        if axis not in stays:
            continue
        change[position] = True
        if bounds.step == 1:
            starts[position], ends[position] = _counted(stays[axis], bounds)
        else:
            starts[position], ends[position] = 0, _pick(cut, axis, stays[axis], bounds)
    operands = [(1, starts, "starts"), (2, ends, "ends")]
    if values[3] is not None:
        operands.append((4, np.where(change, 1, values[3].ravel()), "steps"))
    for operand, sizes, hint in operands:
        _replace_bounds(cut, operand, sizes.astype(values[0].dtype), change, hint)


def _counted(stays: Bools, bounds: slice) -> tuple[int, int]:
    """Return the start and the end of a range among the kept positions."""
    first, last, _ = bounds.indices(len(stays))
    return int(stays[:first].sum()), int(stays[: max(first, last)].sum())


def _pick(cut: Cut, axis: int, stays: Bools, bounds: slice) -> int:
    """Gather the kept positions of a range with steps before the node; return their count."""
    picked = np.arange(len(stays))[bounds]
    renumbered = (np.cumsum(stays) - 1)[picked[stays[picked]]]
    along = [ir.AttrInt64("axis", axis)]
    cut.compute_operand(0, "Gather", [cut.operand(0), renumbered], f"picked{axis}", along)
    return len(renumbered)


def _narrow_attributes(cut: Cut, stays: Mapping[int, Bools]) -> None:
    """Recompute bounds that are attributes (opset below 10)."""
    starts, ends = (list(integers(cut.node, name)) for name in ("starts", "ends"))
    axes = integers(cut.node, "axes", range(len(starts)))
    rank = len(cut.shape(cut.input_name(0)))
    for position, axis in enumerate(axes):
        if axis % rank in stays:
            bounds = slice(starts[position], ends[position])
            starts[position], ends[position] = _counted(stays[axis % rank], bounds)
    cut.node.attributes["starts"] = ir.AttrInt64s("starts", starts)
    cut.node.attributes["ends"] = ir.AttrInt64s("ends", ends)


def _replace_bounds(cut: Cut, operand: int, sizes: Ints, change: Bools, hint: str) -> None:
    if not change.any():
        return
    if change.all() or cut.input_name(operand) in cut.facts.constants:
        cut.set_operand(operand, sizes, hint)
        return
    cut.compute_operand(operand, "Where", [change, sizes, cut.operand(operand)], hint)
