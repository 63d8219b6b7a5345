"""Op rules of Concat, Split and the gathers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Ints
from onnxgrail.graph.attributes import MICROSOFT, integer
from onnxgrail.graph.ops.layers.cache import adopt
from onnxgrail.graph.ops.layers.experts import stack
from onnxgrail.graph.ops.rule import narrow, rule
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.ops.tensors.filled import holds_one, is_filled, pick
from onnxgrail.graph.ops.tensors.layout import RUNTIME, taken
from onnxgrail.graph.ops.tensors.repeated import claim
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import UNALIGNED, Mark

UNNAMED = "one of its outputs has no name, so the size of that piece is not known"
CROSSED = f"the channels of its pieces {UNALIGNED}"
UNEVEN = "another piece of the Concat cannot be narrowed"


@rule("Concat")
def concat(site: Site) -> None:
    """Concatenate labels along the channel axis; along other axes tie the pieces."""
    shape = site.out_shape()
    axis = int(site.attribute("axis")) % len(shape)
    pieces = [k for k in site.operands if site.shape(k)[axis] > 0]
    marks = [m for k in pieces for m in site.marks(k)]
    strung = {a for m in marks if axis in m.axes for a in m.axes}
    if not marks and axis == len(shape) - 1 and any(_loose(site, k) for k in pieces):
        strung = {axis}  # the initial state of an unrolled cell, concatenated with its input
    through = _distinct(site, [m for m in marks if not strung & set(m.axes)])
    found = [_tied(site, mark, pieces) for mark in through]
    site.emit([*found, _string(site, axis, sorted(strung), pieces)] if strung else found)


def _string(site: Site, axis: int, axes: list[int], pieces: Sequence[int]) -> Mark:
    """Concatenate the labels of the pieces; a piece without labels is frozen.

    An exception is a piece that is a constant, repeated or not, which is cut, or is filled with one number.  Marks may
    have other axes too: the two halves of a rotary embedding are concatenated per head.
    """
    parts = []
    for k in pieces:
        sizes = [site.shape(k)[a] for a in axes]
        labels = np.zeros(sizes, dtype=np.int64)
        for mark in site.marks(k):
            if not set(mark.axes) & set(axes):
                continue
            if labels.any() or not set(mark.axes) <= set(axes):
                site.freeze([mark], CROSSED)
            else:
                labels = mark.on(axes, sizes)
        own = Mark(tuple(axes), site.flow.labels.fresh(math.prod(sizes)).reshape(sizes))
        if _loose(site, k):
            labels = own.labels
            if site.is_constant(k):
                site.carry(k, own)
        elif not labels.any() and claim(site, k, own):
            labels = own.labels
        parts.append(labels)
    return Mark(tuple(axes), np.concatenate(parts, axis=axes.index(axis)))


def _loose(site: Site, k: int) -> bool:
    """Return True if a piece has no labels but can be cut nevertheless."""
    return not site.marks(k) and (site.letter(k) == "f" if site.is_constant(k) else is_filled(site, k))


def _distinct(site: Site, marks: Sequence[Mark]) -> list[Mark]:
    """Unite marks with equal axes; tie marks with overlapping axes, and freeze them if that leaves only one of them."""
    found: list[Mark] = []
    queue = list(marks)
    while queue:
        mark = queue.pop(0)
        other = next((m for m in found if set(m.axes) & set(mark.axes)), None)
        if other is None:
            found.append(mark)
        elif other.axes == mark.axes:
            site.union(other.labels, mark.labels)
        else:
            found = [m for m in found if m is not other]
            shared = set(other.axes) & set(mark.axes)
            both = [site.tie(m, [a for a in m.axes if a not in shared], CROSSED) for m in (other, mark)]
            left = [m for m in both if m is not None]
            if len(left) == len(both):
                queue = left + queue
            else:
                site.freeze(left, CROSSED)
    return found


def _tied(site: Site, mark: Mark, pieces: Sequence[int]) -> Mark | None:
    """Pass a mark through all pieces: each must have it, or be a constant or a cache that can be cut.

    Constants of length zero along the axis of the Concat are cut, too: a runtime compares their other axes.
    """
    for k in site.operands:
        if any(set(m.axes) & set(mark.axes) for m in site.marks(k)):
            continue
        if k not in pieces and not _spans(site, k, mark):
            continue
        if site.is_constant(k):
            site.carry(k, mark)
            continue
        if is_filled(site, k) or claim(site, k, mark):
            continue
        why = adopt(site, k, mark, UNEVEN) if k in pieces else ""
        if why:
            site.freeze([mark], why)
            return None
    return mark


def _spans(site: Site, k: int, mark: Mark) -> bool:
    """Return True if a piece has the axes of a mark in the same lengths."""
    shape = site.shape(k)
    return len(shape) == len(site.out_shape()) and tuple(shape[a] for a in mark.axes) == mark.labels.shape


@narrow("Concat")
def narrow_concat(cut: Cut) -> None:
    """Gather the kept positions from a piece filled with one number."""
    axis = integer(cut.node, "axis") % len(cut.shape(cut.output_name()))
    alive = cut.alive(cut.output_name())
    start = 0
    for operand in range(len(cut.node.inputs)):
        name = cut.input_name(operand)
        size = cut.shape(name)[axis]
        if (size or holds_one(cut.operand(operand), cut.facts)) and name not in cut.facts.constants:
            own = cut.alive(name)
            parts = {a: stays[start : start + size] if a == axis else stays for a, stays in alive.items()}
            pick(cut, operand, {a: part for a, part in parts.items() if a not in own and not part.all()})
        start += size


@rule("Split")
def split(site: Site) -> None:
    """Pass the labels of each piece."""
    axis = int(site.attribute("axis", 0)) % len(site.shape(0))
    start = 0
    for output in range(len(site.node.outputs)):
        if not site.out_name(output):
            site.freeze(
                [m for m in site.marks(0) if axis in m.axes],
                UNNAMED,
            )
            return
        size = site.out_shape(output)[axis]
        site.emit([taken(m, axis, np.arange(start, start + size)) for m in site.marks(0)], output)
        start += size


@narrow("Split")
def narrow_split(cut: Cut) -> None:
    """Recompute the sizes; remove `num_outputs` if the pieces have other sizes than it implies."""
    axis = integer(cut.node, "axis") % len(cut.shape(cut.input_name(0)))
    if axis not in cut.alive(cut.input_name(0)):
        return
    sizes = []
    for output in range(len(cut.node.outputs)):
        name = cut.output_name(output)
        stays = cut.alive(name).get(axis)
        sizes.append(cut.shape(name)[axis] if stays is None else int(stays.sum()))
    if "split" in cut.node.attributes or cut.version < 13:
        cut.node.attributes["split"] = ir.AttrInt64s("split", sizes)
    elif len(set(sizes)) > 1 or cut.input_name(1):
        cut.node.attributes.pop("num_outputs", None)
        cut.set_operand(1, np.array(sizes, dtype=np.int64), "split")


@rule("Gather")
def gather(site: Site) -> None:
    """Pass the gathered positions; an embedding table produces its last axis."""
    axis = int(site.attribute("axis", 0)) % len(site.shape(0))
    if site.is_constant(0):
        _table(site, axis)
        return
    marks = site.marks(0)
    inner = len(site.shape(1))
    index = site.value(1)
    moved = []
    for mark in marks:
        if axis in mark.axes:
            if index is None or not site.is_constant(1):
                site.freeze([mark], RUNTIME)
                continue
            picked = _picked(mark, axis, index)
            moved.append(picked)
        else:
            moved.append(Mark(tuple(a if a < axis else a + inner - 1 for a in mark.axes), mark.labels))
    site.emit(moved)


def _picked(mark: Mark, axis: int, index: np.ndarray) -> Mark:
    position = mark.along(axis)
    labels = np.take(mark.labels, index.astype(np.int64), axis=position)
    inner = index.ndim
    axes = [a for a in mark.axes if a < axis] + list(range(axis, axis + inner))
    axes += [a + inner - 1 for a in mark.axes if a > axis]
    return Mark(tuple(axes), labels)


def _table(site: Site, axis: int) -> None:
    """Produce the last axis of an embedding table, or both widths of a stack of experts."""
    shape = site.shape(0)
    if site.is_constant(1) or site.letter(0) != "f" or axis != 0:
        return
    if len(shape) == 3:
        stack(site)
    if len(shape) == 2:
        produced = site.weight(0, 1)
        site.carry(0, Mark((1,), produced), "producer")
        site.emit([Mark((len(site.out_shape()) - 1,), produced)])


@narrow("Gather")
def narrow_gather(cut: Cut) -> None:
    """Renumber the gathered positions."""
    axis = integer(cut.node, "axis") % len(cut.shape(cut.input_name(0)))
    stays = cut.alive(cut.input_name(0)).get(axis)
    if stays is None or cut.input_name(1) not in cut.facts.values:
        return
    index = cut.facts.values[cut.input_name(1)].astype(np.int64) % len(stays)
    renumbered = (np.cumsum(stays) - 1)[index]
    for moved, kept in cut.alive(cut.output_name()).items():
        if axis <= moved < axis + index.ndim:
            renumbered = np.compress(kept, renumbered, axis=moved - axis)
    cut.set_operand(1, renumbered, "indices")


@rule("GatherND")
@rule("GatherND", domain=MICROSOFT)
def gather_nd(site: Site) -> None:
    """Pass positions gathered along the axes after the batch, later axes, and rows of a table."""
    batch = int(site.attribute("batch_dims", 0))
    depth = site.shape(1)[-1]
    if site.is_constant(0):
        if (batch, depth) == (0, 1):
            _table(site, 0)
        return
    index = site.value(1) if site.is_constant(1) and not batch else None
    shift = len(site.shape(1)) - 1 - batch - depth
    found = []
    for mark in site.marks(0):
        if min(mark.axes) >= batch + depth:
            found.append(Mark(tuple(a + shift for a in mark.axes), mark.labels))
        elif index is None:
            site.freeze([mark], RUNTIME)
        else:
            found.append(_picked_nd(mark, index.astype(np.int64)))
    site.emit(found)


def _picked_nd(mark: Mark, index: Ints) -> Mark:
    """Return a mark after positions were gathered by an index over the first axes."""
    depth, outer = index.shape[-1], index.ndim - 1
    labels = mark.labels[tuple(index[..., a] for a in mark.axes if a < depth)]
    return Mark((*range(outer), *(a + outer - depth for a in mark.axes if a >= depth)), labels)


@narrow("GatherND")
@narrow("GatherND", domain=MICROSOFT)
def narrow_gather_nd(cut: Cut) -> None:
    """Renumber the gathered positions."""
    name = cut.input_name(1)
    if name not in cut.facts.constants or name not in cut.facts.values:
        return
    index = cut.facts.values[name].astype(np.int64)
    before = index
    for axis, stays in cut.alive(cut.input_name(0)).items():
        if axis < index.shape[-1]:
            index = index.copy()
            index[..., axis] = (np.cumsum(stays) - 1)[index[..., axis] % len(stays)]
    for axis, kept in cut.alive(cut.output_name()).items():
        if axis < before.ndim - 1:
            index = np.compress(kept, index, axis=axis)
    if index is not before:
        cut.set_operand(1, index, "indices")
