"""Concat, Split and the gathers: several tensors share an axis, or one is dealt out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrail.graph.flow import Site
from onnxgrail.graph.labels import Mark
from onnxgrail.graph.ops.cut import Cut
from onnxgrail.graph.ops.layout import RUNTIME, taken
from onnxgrail.graph.ops.rule import narrow, rule

UNEVEN = "another piece of the Concat is an activation that cannot be narrowed"


@rule("Concat")
def concat(site: Site) -> None:
    """Along the channels labels are strung together; along another axis the pieces are tied."""
    shape = site.out_shape()
    axis = int(site.attribute("axis")) % len(shape)
    pieces = [k for k in site.operands if site.shape(k)[axis] > 0]
    marks = {k: site.marks(k) for k in pieces}
    across = [m for k in pieces for m in marks[k] if axis in m.axes]
    outward = [m for k in pieces for m in marks[k] if axis not in m.axes]
    result = [_string(site, axis, pieces)] if across else []
    for mark in _distinct(site, outward):
        result.append(_tied(site, mark, axis, pieces))
    site.emit(result)


def _string(site: Site, axis: int, pieces: Sequence[int]) -> Mark:
    """Labels along the concatenated axis; pieces without labels are permanent there."""
    parts = []
    for k in pieces:
        size = site.shape(k)[axis]
        own = next((m for m in site.marks(k) if axis in m.axes), None)
        if own is not None:
            parts.append(site.collapse(own, axis))
        elif site.is_constant(k) and site.dtype(k).kind == "f":
            parts.append(np.zeros(size, dtype=np.int64))
        else:
            parts.append(np.zeros(size, dtype=np.int64))
    return Mark((axis,), np.concatenate(parts))


def _distinct(site: Site, marks: Sequence[Mark]) -> list[Mark]:
    """Marks on other axes, united where they share an axis."""
    found: list[Mark] = []
    for mark in marks:
        current: Mark | None = mark
        for k, other in enumerate(found):
            if current is None or not set(other.axes) & set(current.axes):
                continue
            if other.axes == current.axes:
                site.union(other.labels, current.labels)
            else:
                shared = set(other.axes) & set(current.axes)
                reason = "its pieces do not line up"
                a = site.tie(other, [x for x in other.axes if x not in shared], reason)
                b = site.tie(current, [x for x in current.axes if x not in shared], reason)
                if a is not None and b is not None and a.axes == b.axes:
                    site.union(a.labels, b.labels)
                    found[k] = a
            current = None
        if current is not None:
            found.append(current)
    return found


def _tied(site: Site, mark: Mark, axis: int, pieces: Sequence[int]) -> Mark | None:
    """A mark that runs through all pieces: each must have it, or be a constant that can be cut."""
    current: Mark | None = mark
    for k in pieces:
        if current is None:
            return None
        if any(set(m.axes) & set(current.axes) for m in site.marks(k)):
            continue
        if site.is_constant(k):
            site.carry(k, current)
        else:
            site.freeze([current], UNEVEN)
            return None
    return current


@rule("Split")
def split(site: Site) -> None:
    """Each piece keeps its own labels; sizes are rewritten."""
    axis = int(site.attribute("axis", 0)) % len(site.shape(0))
    start = 0
    for output in range(len(site.node.outputs)):
        if not site.out_name(output):
            site.freeze([m for m in site.marks(0) if axis in m.axes], "one of its outputs is unused")
            return
        size = site.out_shape(output)[axis]
        site.emit([taken(m, axis, np.arange(start, start + size)) for m in site.marks(0)], output)
        start += size


@narrow("Split")
def narrow_split(cut: Cut) -> None:
    """Sizes are counted anew; `num_outputs` goes when the pieces are no longer what it would deal."""
    attribute = cut.node.attributes.get("axis")
    axis = (0 if attribute is None else attribute.as_int()) % len(cut.shape(cut.input_name(0)))
    if axis not in cut.alive(cut.input_name(0)):
        return
    sizes = []
    for output in range(len(cut.node.outputs)):
        name = cut.output_name(output)
        stays = cut.alive(name).get(axis)
        sizes.append(cut.shape(name)[axis] if stays is None else int(stays.sum()))
    if "split" in cut.node.attributes:
        import onnx_ir as ir

        cut.node.attributes["split"] = ir.AttrInt64s("split", sizes)
    elif len(set(sizes)) > 1 or cut.input_name(1):
        cut.node.attributes.pop("num_outputs", None)
        cut.set_operand(1, np.array(sizes, dtype=np.int64), "split")


@rule("Gather")
def gather(site: Site) -> None:
    """Positions are picked; an embedding table produces its last axis."""
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
    """An embedding: rows are looked up, the remaining axis is produced."""
    shape = site.shape(0)
    if site.is_constant(1) or site.dtype(0).kind != "f" or len(shape) != 2 or axis != 0:
        return
    produced = site.weight(0, 1)
    site.carry(0, Mark((1,), produced), "producer")
    site.emit([Mark((len(site.out_shape()) - 1,), produced)])


@narrow("Gather")
def narrow_gather(cut: Cut) -> None:
    """Picked positions are renumbered."""
    attribute = cut.node.attributes.get("axis")
    axis = (0 if attribute is None else attribute.as_int()) % len(cut.shape(cut.input_name(0)))
    stays = cut.alive(cut.input_name(0)).get(axis)
    if stays is None or cut.input_name(1) not in cut.facts.values:
        return
    index = cut.facts.values[cut.input_name(1)].astype(np.int64) % len(stays)
    renumbered = (np.cumsum(stays) - 1)[index]
    cut.set_operand(1, renumbered[stays[index]] if index.ndim else renumbered, "indices")


@rule("GatherND")
def gather_nd(site: Site) -> None:
    """Leading positions are picked; later axes pass."""
    index = site.value(1)
    depth = site.shape(1)[-1]
    if site.is_constant(0):
        return
    stuck = [m for m in site.marks(0) if min(m.axes) < depth or site.attribute("batch_dims", 0)]
    if index is None or stuck:
        site.freeze(stuck, RUNTIME)
    shift = len(site.shape(1)) - 1 - depth
    site.emit(
        Mark(tuple(a + shift for a in m.axes), m.labels) for m in site.marks(0) if all(m is not s for s in stuck) and min(m.axes) >= depth
    )


@rule("GatherElements")
def gather_elements(site: Site) -> None:
    """Passes along axes that the index does not pick from."""
    axis = int(site.attribute("axis", 0)) % len(site.shape(0))
    before, after = site.shape(0), site.out_shape()
    index_marks = site.marks(1)
    passing = []
    for mark in site.marks(0):
        if axis in mark.axes or any(before[a] != after[a] for a in mark.axes) or index_marks:
            site.freeze([mark], RUNTIME)
        else:
            # the index is of full size along these axes and has no labels to be cut by
            site.freeze([mark], "its index spans the channels")
    site.emit(passing)
    site.freeze(index_marks, RUNTIME)
