"""Combine the marks of broadcast operands, for pointwise ops and batched products."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.graph.attributes import moved_from
from onnxgrail.graph.flatten.states import STATE, STAYS
from onnxgrail.graph.ops.tensors.repeated import chain, claim
from onnxgrail.graph.rotate.marked import PICKED
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import UNALIGNED, Mark

TABLE = "a table over the last axis, as of a rotary embedding, is shared by all heads: features stay"
GATE = "it scales whole heads, which stay, because channels inside of them can go"
INPUT = "it is combined with {}, an input of the model, whose size stays"
MOVES = frozenset({"Cast", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"})
UNLABELLED = "it is combined with another tensor of the same width that cannot be narrowed"


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """An operand aligned to the output's axes.

    Attributes:
        operand: its position among the node's inputs.
        sizes: its size per output axis, 1 if broadcast.
        marks: its marks on output axes.
        constant: it is a constant.
        offset: the output's rank minus its own.
    """

    operand: int
    sizes: tuple[int, ...]
    marks: tuple[Mark, ...]
    constant: bool
    offset: int

    def full(self, axes: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
        """Return the axes along which the operand has full size."""
        return tuple(a for a in axes if self.sizes[a] == shape[a])


def operand(site: Site, position: int, rank: int) -> Operand:
    """Return an input aligned to an output of the given rank."""
    shape = site.shape(position)
    offset = rank - len(shape)
    marks = tuple(Mark(tuple(a + offset for a in m.axes), m.labels) for m in site.marks(position))
    return Operand(position, (1,) * offset + shape, marks, site.is_constant(position), offset)


def positions_of(site: Site, operands: Sequence[Operand], shape: tuple[int, ...]) -> Operand | None:
    """Return the operand with which a product scales channels inside heads by position; None if there is none.

    It spans the last axis and is the same for all heads, like the cosines of a rotary embedding; of channels without an
    axis of heads (one head that all queries read) it is what has no labels.
    """
    if site.flow.tables is None:
        marked = site.node.metadata_props.get(PICKED)
        return None if marked is None else next(o for o in operands if o.operand == int(marked))
    if site.node.op_type != "Mul":
        return None
    last = len(shape) - 1
    for table, carrier in (operands, operands[::-1]):
        spanning = [mark for mark in carrier.marks if last in mark.axes]
        heads = [a for mark in spanning for a in mark.axes if a != last]
        flat = all(m.axes == (last,) for m in table.marks) if heads else not table.marks
        if spanning and flat and shape[last] > 1 and table.full([*heads, last], shape) == (last,):
            site.flow.positions[site.key] = table.operand
            return table
    return None


def combine(
    site: Site, operands: Sequence[Operand], shape: tuple[int, ...], *, filled: Sequence[int] = ()
) -> list[Mark]:
    """Return the marks of a broadcasting op's output, after tying operands and claiming constants.

    Args:
        site: the node.
        operands: its aligned operands.
        shape: of the output.
        filled: positions of operands from which the node's rewrite gathers what it needs, so they are not tied.
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
    """A mark of the output and the operands that share its labels."""

    mark: Mark
    owners: frozenset[int]


def _meet(site: Site, dynamic: Sequence[Operand], shape: tuple[int, ...]) -> list[_Shared]:
    """Union the marks of all activations so that the resulting marks have disjoint axes."""
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
    """Unite two overlapping marks with equal axes, or tie them along the axes that only one of them has."""
    if a.mark.axes == b.mark.axes:
        site.union(a.mark.labels, b.mark.labels)
        return _still(site.flow.labels.normal(a.mark, site.why_none(a.mark)), a.owners | b.owners)
    if len(a.mark.axes) < len(b.mark.axes):
        a, b = b, a
    first, second = a.mark, b.mark
    both = [axis for axis in first.axes if axis in second.axes]
    rest = [axis for axis in first.axes if axis not in second.axes]
    last = len(shape) - 1
    if _of_heads(site, first, second.axes, shape):
        site.freeze([second], GATE)
        return [a]
    if last in both and set(second.axes) <= set(first.axes) and not any(own[k].full(rest, shape) for k in b.owners):
        # rotary tables and per-feature scales: the joint mark keeps its outer axes (heads), the table stays whole
        site.freeze([second], TABLE)
        return _still(site.tie(first, both, TABLE), a.owners)
    reason = f"the channels of its operands {UNALIGNED}"
    extra = [axis for axis in second.axes if axis not in first.axes]
    return [
        *_still(site.tie(first, rest, reason), a.owners),
        *_still(site.tie(second, extra, reason) if extra else second, b.owners),
    ]


def _of_heads(site: Site, mark: Mark, axes: Collection[int], shape: Sequence[int]) -> bool:
    """Return True if channels inside heads are followed, and what has some axes is the same for all in a head."""
    last = len(shape) - 1
    return site.flow.tables is not None and last in mark.axes and last not in axes


def _still(mark: Mark | None, owners: frozenset[int]) -> list[_Shared]:
    """Return the mark left by a tie with its owners; empty if the tie froze everything."""
    return [] if mark is None else [_Shared(mark, owners)]


def _respect(site: Site, shared: _Shared, dynamic: Sequence[Operand], shape: tuple[int, ...]) -> list[Mark]:
    """Tie a mark along axes at which another activation of full size has no matching labels."""
    current: Mark | None = shared.mark
    for other in dynamic:
        if current is None:
            return []
        stuck = [a for a in other.full(current.axes, shape) if shape[a] > 1]
        if _of_heads(site, current, stuck, shape):
            continue
        if other.operand not in shared.owners and stuck and site.letter(other.operand) in "fbiu":
            repeated = chain(site, other.operand)
            current = _claim(site, current, other, shape) if repeated else site.tie(current, stuck, _fixed(site, other))
    return [] if current is None else [current]


def _fixed(site: Site, other: Operand) -> str:
    """Return the reason why an activation without labels stays; name the input of the model that it holds, if any."""
    value = site.node.inputs[other.operand]
    value = moved_from(value, MOVES) if value is not None else None
    if value is None or not value.is_graph_input():
        return UNLABELLED
    if value.name in site.flow.state_axes:
        return STAYS if site.flow.interface else STATE
    return INPUT.format(value.name)


def _claim(site: Site, mark: Mark, other: Operand, shape: tuple[int, ...]) -> Mark | None:
    """Cut a constant that spans the mark's axes with it, before the node that repeats it if there is one."""
    spanned = other.full(mark.axes, shape)
    if not spanned or _of_heads(site, mark, spanned, shape):
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
    """Produce channels from a float constant that alone spans an outer axis (per-head slopes or biases)."""
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
