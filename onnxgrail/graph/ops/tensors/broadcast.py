"""Broadcasting: how marks of several operands meet in one output, shared by pointwise ops and batched products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.graph.ops.tensors.repeated import claim, is_repeated
from onnxgrail.graph.trace.causes import UNALIGNED
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

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
    held = [o for o in dynamic if o.operand not in filled]
    found = [m for shared in _meet(site, dynamic, shape) for m in _respect(site, shared, held, shape)]
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


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """A mark of the output, and the operands that go with it."""

    mark: Mark
    owners: frozenset[int]


def _meet(site: Site, dynamic: Sequence[Operand], shape: tuple[int, ...]) -> list[_Shared]:
    """Union the marks of all dynamic operands so that the resulting marks have disjoint axes."""
    own = {o.operand: o for o in dynamic}
    result: list[_Shared] = []
    queue = [_Shared(mark, frozenset({o.operand})) for o in dynamic for mark in o.marks]
    while queue:
        shared = queue.pop(0)
        clash = next((r for r in result if set(r.mark.axes) & set(shared.mark.axes)), None)
        if clash is None:
            result.append(shared)
            continue
        result.remove(clash)
        queue = _join(site, clash, shared, own, shape) + queue
    return result


def _join(site: Site, a: _Shared, b: _Shared, own: Mapping[int, Operand], shape: tuple[int, ...]) -> list[_Shared]:
    """Two overlapping marks become one, or fewer axes and then one."""
    if a.mark.axes == b.mark.axes:
        site.union(a.mark.labels, b.mark.labels)
        return _still(site.flow.labels.normal(a.mark, site.why_none(a.mark)), a.owners | b.owners)
    if len(a.mark.axes) < len(b.mark.axes):
        a, b = b, a
    first, second = a.mark, b.mark
    both = [axis for axis in first.axes if axis in second.axes]
    rest = [axis for axis in first.axes if axis not in second.axes]
    last = len(shape) - 1
    if last in both and set(second.axes) <= set(first.axes) and not any(own[k].full(rest, shape) for k in b.owners):
        # rotary tables and per-feature scales: the wide mark keeps its outer axes (heads), the table stays whole
        site.freeze([second], TABLE)
        return _still(site.tie(first, both, TABLE), a.owners)
    reason = f"the channels of its operands {UNALIGNED}"
    extra = [axis for axis in second.axes if axis not in first.axes]
    return [
        *_still(site.tie(first, rest, reason), a.owners),
        *_still(site.tie(second, extra, reason) if extra else second, b.owners),
    ]


def _still(mark: Mark | None, owners: frozenset[int]) -> list[_Shared]:
    """A mark that a tie left over; nothing where it froze all."""
    return [] if mark is None else [_Shared(mark, owners)]


def _respect(site: Site, shared: _Shared, dynamic: Sequence[Operand], shape: tuple[int, ...]) -> list[Mark]:
    """An activation of full size along an axis that does not go with it keeps that axis whole."""
    current: Mark | None = shared.mark
    for other in dynamic:
        if current is None:
            return []
        stuck = [a for a in other.full(current.axes, shape) if shape[a] > 1]
        if other.operand not in shared.owners and stuck and site.letter(other.operand) in "fbiu":
            repeated = is_repeated(site, other.operand)
            current = _claim(site, current, other, shape) if repeated else site.tie(current, stuck, UNLABELLED)
    return [] if current is None else [current]


def _claim(site: Site, mark: Mark, other: Operand, shape: tuple[int, ...]) -> Mark | None:
    """A constant that spans the mark's axes is cut with it, in front of the node that repeats it where there is one."""
    spanned = other.full(mark.axes, shape)
    if not spanned:
        return mark
    rest = [a for a in mark.axes if a not in spanned]
    if rest and len(shape) - 1 in spanned:
        return site.tie(mark, spanned, TABLE)
    claimed: Mark | None = mark
    if rest:
        claimed = site.tie(mark, rest, "a constant is shared by positions that would have to go separately")
    if claimed is None:
        return None
    own = Mark(tuple(a - other.offset for a in claimed.axes), claimed.labels)
    if other.constant:
        site.carry(other.operand, own)
    elif not claim(site, other.operand, own):
        return site.tie(claimed, claimed.axes, UNLABELLED)
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
