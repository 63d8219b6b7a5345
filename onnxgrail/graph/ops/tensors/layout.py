"""Op rules that move positions: the op is applied to the labels."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence

import numpy as np

from onnxgrail.core import Ints
from onnxgrail.graph.attributes import MICROSOFT
from onnxgrail.graph.ops.rule import refused, rule
from onnxgrail.graph.rotate.marked import MADE
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

HEADED = 4  # axes of a tensor that may have one for heads
RUNTIME = "which positions it takes is computed at run time"


def factor(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the smallest groups of axes that a reshape maps onto each other."""
    i = j = 0
    while i < len(before) or j < len(after):
        start, stop = i, j
        left = right = 1
        while True:
            if left == right and (i > start or j > stop):
                break
            if (left < right or j >= len(after)) and i < len(before):
                left *= before[i]
                i += 1
            elif j < len(after):
                right *= after[j]
                j += 1
            else:
                break
        yield tuple(range(start, i)), tuple(range(stop, j))


def reshaped(mark: Mark, before: Sequence[int], after: Sequence[int]) -> Mark:
    """Return a mark after a reshape, on the output axes of every group that it touches."""
    inner: list[int] = []
    outer: list[int] = []
    for left, right in factor(before, after):
        if set(left) & set(mark.axes):
            inner += left
            outer += right
    labels = mark.on(inner, [before[a] for a in inner]).reshape([after[a] for a in outer])
    return Mark(tuple(outer), labels)


refused(
    "Reshape", why="its shape is an attribute: convert the model to opset 13 or newer",
    told="Refuse: the shape is an attribute.",
)  # fmt: skip


@rule("Reshape", since=5)
@rule("Flatten", "Squeeze", "Unsqueeze")
@rule("ExpandDims", domain=MICROSOFT)
def reshape(site: Site) -> None:
    """Reshape the labels."""
    before, after = site.shape(0), site.out_shape()
    if math.prod(before) == 0:
        site.freeze(site.marks(0), "its tensor was empty in the trial run: give an input of another size")
        return
    site.emit(reshaped(m, before, after) for m in site.marks(0))


@rule("Transpose")
def transpose(site: Site) -> None:
    """Permute the labels."""
    rank = len(site.shape(0))
    order = list(site.attribute("perm", range(rank)[::-1]))
    site.emit(permuted(m, order) for m in site.marks(0))


def permuted(mark: Mark, order: list[int]) -> Mark:
    """Return a mark after a transposition; `order` holds the original axis of each axis."""
    return mark.moved([order.index(a) for a in mark.axes])


@rule("Expand")
def expand(site: Site) -> None:
    """Repeat labels along broadcast axes; an axis that only the expansion creates produces channels."""
    if made(site):
        return
    before, after = site.shape(0), site.out_shape()
    if site.is_constant(0) and math.prod(before) == 1 and len(after) < HEADED:  # each reader takes what it needs
        return
    offset = len(after) - len(before)
    sizes = [1] * offset + list(before)
    marks = [Mark(tuple(a + offset for a in m.axes), m.labels) for m in site.marks(0)]
    if all(m.axes == (len(after) - 1,) for m in marks) and site.letter(0) in "fb":
        # copies along an axis (a mask or a shared key per head) can be removed one by one; the last axis holds features
        varying = site.flow.facts.varying.get(site.out_name(), frozenset())
        grown = [a for a in range(len(after) - 1) if sizes[a] == 1 and after[a] > 1 and a not in varying]
        marks += [Mark((a,), site.flow.labels.fresh(after[a])) for a in grown]
    site.emit(marks)


def made(site: Site) -> bool:
    """Produce the channels of a constant that the node repeats or scales in the basis of a stream, if it does so."""
    marked = site.node.metadata_props.get(MADE)
    if marked is None or any(site.marks(k) for k in range(len(site.node.inputs))):
        return False
    operand, axis = map(int, marked.split())
    produced = site.weight(operand, axis)
    site.carry(operand, Mark((axis,), produced), "producer")
    site.emit([Mark((len(site.out_shape()) - len(site.shape(operand)) + axis,), produced)])
    return True


@rule("Tile")
def tile(site: Site) -> None:
    """Repeat the labels."""
    before, after = site.shape(0), site.out_shape()
    moved = []
    for mark in site.marks(0):
        repeats = [after[a] // before[a] for a in mark.axes]
        moved.append(Mark(mark.axes, np.tile(mark.labels, repeats)))
    site.emit(moved)


def taken(mark: Mark, axis: int, positions: Ints) -> Mark:
    """Return a mark after positions were gathered along one axis."""
    if axis not in mark.axes:
        return mark
    return Mark(mark.axes, np.take(mark.labels, positions, axis=mark.along(axis)))


@rule("DynamicSlice")  # as keras2onnx writes it for opset 9
@rule("Slice", since=10)
def slicing(site: Site) -> None:
    """Slice the labels; a table of positions, of which some rows are taken, produces its last axis."""
    ranges = slices(site)
    if ranges is None:
        site.freeze(site.marks(0), RUNTIME)
        return
    if _takes_rows(site, ranges):
        last = len(site.shape(0)) - 1
        produced = site.weight(0, last)
        site.carry(0, Mark((last,), produced), "producer")
        site.emit([Mark((last,), produced)])
        return
    marks = list(site.marks(0))
    for axis, bounds in ranges.items():
        positions = np.arange(site.shape(0)[axis])[bounds]
        marks = [taken(m, axis, positions) for m in marks]
    site.emit(marks if 0 not in site.out_shape() else [])


def _takes_rows(site: Site, ranges: Container[int]) -> bool:
    """Return True for a constant of floats of which all of the last axis stays; a mask is sliced there, too."""
    again = any(use.node.op_type == "Slice" for use in site.node.outputs[0].uses())
    last = len(site.shape(0)) - 1
    return site.is_constant(0) and site.letter(0) == "f" and last > 0 and last not in ranges and not again


@rule("Slice", since=1)
def slicing_by_attribute(site: Site) -> None:
    """Slice the labels."""
    shape = site.shape(0)
    starts, ends = site.attribute("starts"), site.attribute("ends")
    axes = site.attribute("axes", range(len(starts)))
    marks = list(site.marks(0))
    for axis, start, end in zip(axes, starts, ends, strict=True):
        marks = [taken(m, axis % len(shape), np.arange(shape[axis])[start:end]) for m in marks]
    site.emit(marks if 0 not in site.out_shape() else [])


def slices(site: Site) -> dict[int, slice] | None:
    """Return axis -> slice of a Slice node; None if not known."""
    values = [site.value(k) if site.name(k) else None for k in range(1, 5)]
    if values[0] is None or values[1] is None or (site.name(3) and values[2] is None):
        return None
    return bounds_of(len(site.shape(0)), values)


def bounds_of(rank: int, values: Sequence[Ints | None]) -> dict[int, slice]:
    """Return axis -> slice from the operands starts, ends, axes, steps of a Slice node."""
    assert values[0] is not None
    assert values[1] is not None
    starts, ends = values[0].ravel().tolist(), values[1].ravel().tolist()
    axes = list(range(len(starts))) if values[2] is None else [int(a) % rank for a in values[2].ravel()]
    steps = [1] * len(starts) if values[3] is None else values[3].ravel().tolist()
    found = {}
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        stop = None if step < 0 and end < -(2**31) else end
        found[axis] = slice(start, stop, step)
    return found
