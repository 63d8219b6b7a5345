"""Broadcasting: how marks of several operands meet in one output, shared by pointwise ops and batched products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.graph.flow import Site
from onnxgrail.graph.labels import Mark

TABLE = "a table over the last axis, as of a rotary embedding, is shared by all heads: features stay"
UNLABELLED = "it is combined with another tensor of the same width that cannot be narrowed"


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One operand in the output's coordinates: its size per output axis (1 where broadcast) and its marks.

    `operand` is its position among the node's inputs; `offset` is the output's rank minus its own.
    """

    operand: int
    sizes: tuple[int, ...]
    marks: tuple[Mark, ...]
    constant: bool
    offset: int

    def full(self, axes: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
        """Which of the axes it spans itself."""
        return tuple(a for a in axes if self.sizes[a] == shape[a])


def operand(site: Site, position: int, rank: int) -> Operand:
    """An input aligned to an output of the given rank."""
    shape = site.shape(position)
    offset = rank - len(shape)
    marks = tuple(Mark(tuple(a + offset for a in m.axes), m.labels) for m in site.marks(position))
    return Operand(position, (1,) * offset + shape, marks, site.is_constant(position), offset)


def combine(
    site: Site, operands: Sequence[Operand], shape: tuple[int, ...], *, filled: Sequence[int] = ()
) -> list[Mark]:
    """Marks of the output of a broadcasting op, after tying what must live together and claiming constants.

    The node's rewrite takes what it needs of the operands in `filled`, so they tie nothing.
    """
    dynamic = [o for o in operands if not o.constant]
    found = _meet(site, dynamic, shape)
    held = [o for o in dynamic if o.operand not in filled]
    found = [m for mark in found for m in _respect(site, mark, held, shape)]
    constants = [o for o in operands if o.constant and max(o.sizes, default=1) > 1]
    result: list[Mark] = []
    for mark in found:
        claimed: Mark | None = mark
        for other in constants:
            claimed = _claim(site, claimed, other, shape) if claimed is not None else None
        if claimed is not None:
            result.append(claimed)
    for other in constants:
        result.extend(_alone(site, other, operands, result, shape))
    return result


def _meet(site: Site, dynamic: Sequence[Operand], shape: tuple[int, ...]) -> list[Mark]:
    """Union the marks of all dynamic operands so that the resulting marks have disjoint axes."""
    result: list[tuple[Mark, Operand]] = []
    queue = [(mark, o) for o in dynamic for mark in o.marks]
    while queue:
        mark, owner = queue.pop(0)
        clash = next((r for r in result if set(r[0].axes) & set(mark.axes)), None)
        if clash is None:
            result.append((mark, owner))
            continue
        result.remove(clash)
        queue = [(m, o) for m, o in _join(site, clash, (mark, owner), shape) if m is not None] + queue
    return [m for m, _ in result]


def _join(
    site: Site, a: tuple[Mark, Operand], b: tuple[Mark, Operand], shape: tuple[int, ...]
) -> list[tuple[Mark | None, Operand]]:
    """Two overlapping marks become one, or fewer axes and then one."""
    (first, owner), (second, other) = a, b
    if first.axes == second.axes:
        site.union(first.labels, second.labels)
        return [(site.flow.labels.normal(first, site.why_none(first)), owner)]
    if len(first.axes) < len(second.axes):
        (first, owner), (second, other) = (second, other), (first, owner)
    shared = [a for a in first.axes if a in second.axes]
    rest = [a for a in first.axes if a not in second.axes]
    last = len(shape) - 1
    if last in shared and set(second.axes) <= set(first.axes) and not other.full(rest, shape):
        # rotary tables and per-feature scales: the wide mark keeps its outer axes (heads), the table stays whole
        site.freeze([second], TABLE)
        return [(site.tie(first, shared, TABLE), owner)]
    reason = "the channels of its operands do not line up one to one"
    tied = [(site.tie(first, rest, reason), owner)]
    extra = [a for a in second.axes if a not in first.axes]
    return [*tied, (site.tie(second, extra, reason) if extra else second, other)]


def _respect(site: Site, mark: Mark, dynamic: Sequence[Operand], shape: tuple[int, ...]) -> list[Mark]:
    """An unmarked activation of full size along an axis keeps that axis whole."""
    current: Mark | None = mark
    for other in dynamic:
        if current is None:
            return []
        covered = {a for m in other.marks for a in m.axes}
        stuck = [a for a in other.full(current.axes, shape) if a not in covered and shape[a] > 1]
        if stuck and site.letter(other.operand) in "fbiu":
            current = site.tie(current, stuck, UNLABELLED)
    return [] if current is None else [current]


def _claim(site: Site, mark: Mark, other: Operand, shape: tuple[int, ...]) -> Mark | None:
    """A constant that spans the mark's axes is cut with it."""
    spanned = other.full(mark.axes, shape)
    if not spanned:
        return mark
    rest = [a for a in mark.axes if a not in spanned]
    if rest and len(shape) - 1 in spanned:
        return site.tie(mark, spanned, TABLE)
    claimed: Mark | None = mark
    if rest:
        claimed = site.tie(mark, rest, "a constant is shared by positions that would have to go separately")
    if claimed is not None:
        site.carry(other.operand, Mark(tuple(a - other.offset for a in claimed.axes), claimed.labels))
    return claimed


def _alone(
    site: Site, other: Operand, operands: Sequence[Operand], found: Sequence[Mark], shape: tuple[int, ...]
) -> list[Mark]:
    """A float constant that alone carries an outer axis (per-head slopes or biases) brings channels of its own."""
    if site.letter(other.operand) != "f":
        return []
    taken = {a for m in found for a in m.axes}
    rest = [o for o in operands if o is not other]
    axes = [a for a in range(len(shape) - 1) if other.sizes[a] > 1 and all(o.sizes[a] == 1 for o in rest)]
    if len(axes) != 1 or axes[0] in taken:
        return []
    labels = site.weight(other.operand, axes[0] - other.offset)
    site.carry(other.operand, Mark((axes[0] - other.offset,), labels))
    return [Mark((axes[0],), np.asarray(labels))]
