"""Sums over calibration batches that are equal, bit for bit, for any number of processes.

Floating-point sums depend on their order, so the order is fixed: batches are cut into equal stretches of four or more
(fewer if there are few batches), a stretch is summed in the order of its batches, and stretches are the leaves of a
binary tree.  A process has neighboring leaves; the partial sums that it cannot complete alone are nodes of that tree
and are sent to the process that owns the sum: the first one, another one, or several, each of which completes a piece
and gives it to the others.  At any time only a logarithmic number of partial sums exists.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from onnxgrail.core import Array, Floats
from onnxgrail.machine.steps.codec import Record

LEAVES = 32  # upper limit on the number of processes that can share the work
FEWER = 4  # number of stretches for few batches: each stretch costs a sum of its own
EMPTY = np.zeros(0)  # stands for a sum that another process owns


@dataclass(slots=True, eq=False)
class Node:
    """Sums over the leaves `index * 2**level` and following, `2**level` of them (fewer at the end)."""

    level: int
    index: int
    arrays: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Owners:
    """The processes that get a sum.

    Attributes:
        ranks: their numbers.
        cut: False if the sum cannot be completed in pieces, because it is a list of bytes.
    """

    ranks: range
    cut: bool = True


FIRST = Owners(range(1))
"""The first process."""
NOWHERE: Mapping[int, Sequence[Array]] = {}
"""No places for what other processes send."""


class Group(Protocol):
    """The processes that work on a job; all do the same on different batches, and the first process reports."""

    @property
    def rank(self) -> int:
        """Return the number of this process; process 0 writes and prints."""

    @property
    def size(self) -> int:
        """Return the number of processes."""

    def collect(self, nodes: list[Node], owners: Sequence[int]) -> None:
        """Combine the partial sums of all processes: of array n in process `owners[n]`; elsewhere it becomes empty."""

    def exchange(
        self, arrays: Sequence[Array], count: int, places: Mapping[int, Sequence[Array]] = NOWHERE
    ) -> list[Sequence[Array]]:
        """Return the arrays of each of the first `count` processes, flat; these make the call, the others don't.

        By process, `places` are arrays in which its arrays land if they have the same sizes and types.
        """

    def share(self, record: Record | None, source: int = 0) -> Record | None:
        """Return the record of the process `source` on every process."""

    def agree(self, text: str) -> bool:
        """Return True if all processes give the same text."""


class Solo:
    """The group of a single process."""

    rank, size = 0, 1

    def collect(self, nodes: list[Node], owners: Sequence[int]) -> None:
        """Do nothing: a single process has all sums already."""

    def exchange(
        self,
        arrays: Sequence[Array],
        count: int,  # noqa: ARG002  of the protocol
        places: Mapping[int, Sequence[Array]] = NOWHERE,  # noqa: ARG002
    ) -> list[Sequence[Array]]:
        """Return the own arrays."""
        return [arrays]

    def share(self, record: Record | None, source: int = 0) -> Record | None:  # noqa: ARG002
        """Return the record unchanged."""
        return record

    def agree(self, text: str) -> bool:  # noqa: ARG002
        """Return True."""
        return True


SOLO = Solo()


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The part of the batches that one process works on.

    Attributes:
        group: the processes.
        total: number of all batches.
        numbers: numbers of the batches of this process.
        spare: there is no batch for this process; it runs the first batch like the others and adds nothing to the sums.
    """

    group: Group
    total: int
    numbers: range
    spare: bool = False

    @property
    def each(self) -> int:
        """Return the number of batches per leaf of the sums; the last leaf may have fewer."""
        return _each(self.total)

    def closes(self, number: int, *, whole: bool = False) -> bool:
        """Return True if a batch ends its leaf; with `whole`, all batches of this process are one leaf."""
        return number == self.numbers[-1] or ((number + 1) % self.each == 0 and not whole)

    @property
    def leaves(self) -> int:
        """Return the number of leaves of all batches."""
        return -(-self.total // self.each)

    def split(self, ways: int) -> list[Shard]:
        """Split into at most `ways` parts of neighboring leaves, of similar size, in the order of the batches."""
        leaves = -(-len(self.numbers) // self.each)
        ways = min(ways, leaves)
        starts = (self.numbers.start + -(-leaves * way // ways) * self.each for way in range(ways + 1))
        ends = [min(start, self.numbers.stop) for start in starts]
        return [replace(self, numbers=range(a, b)) for a, b in itertools.pairwise(ends)]


def shard_of(group: Group, total: int) -> Shard:
    """Return this process's part of `total` batches: neighboring leaves, of similar size for all processes."""
    each = _each(total)
    leaves = -(-total // each)
    first, last = (-(-leaves * rank // group.size) * each for rank in (group.rank, group.rank + 1))
    numbers = range(first, min(last, total))
    return Shard(group, total, numbers or range(1), spare=not numbers)


class Tally:
    """A running sum of arrays over the batches of all processes."""

    def __init__(self, shard: Shard) -> None:
        self._shard, self._each = shard, shard.each
        self._nodes: list[Node] = []
        self._leaf: Node | None = None

    def add(self, number: int, arrays: Iterable[Array]) -> None:
        """Add the arrays of batch `number`: always as many arrays, each of the same shape or empty; bytes are appended.

        Batches come in order, each once.  The tally takes ownership of the arrays.
        """
        if self._shard.spare:
            return
        leaf = number // self._each
        if self._leaf is not None and self._leaf.index == leaf:
            _accumulate(self._leaf, arrays)
            return
        self._close()
        self._leaf = Node(level=0, index=leaf, arrays=tuple(arrays))

    def join(self, others: Iterable[Tally]) -> None:
        """Take over the sums of other tallies of this process, which cover the batches that follow."""
        self._close()
        for other in others:
            other._close()
            for node in other._nodes:
                push(self._nodes, node)
            other._nodes = []

    def total(self, owners: Sequence[Owners]) -> tuple[Floats, ...]:
        """Return the sums that this process owns, and empty arrays for the others.  All processes must call it.

        An array that was empty in this process's first batches may be returned flat.

        Args:
            owners: per array.
        """
        self._close()
        group, nodes, self._nodes = self._shard.group, self._nodes, []
        shapes = [array.shape for array in nodes[0].arrays] if nodes else [(0,)] * len(owners)
        wholes = [array.reshape(-1) for array in nodes[0].arrays] if nodes else [EMPTY] * len(owners)
        pieces = [(number, rank) for number, one in enumerate(owners) for rank in _makers(one)]
        for node in nodes:
            node.arrays = tuple(p for one, a in zip(owners, node.arrays, strict=True) for p in _pieces(a, one))
        group.collect(nodes, [rank for _, rank in pieces])
        while len(nodes) > 1:  # the right edge of the tree, bottom up
            last = nodes.pop()
            _accumulate(nodes[-1], last.arrays)
        made = dict(zip(pieces, nodes[0].arrays if nodes else [EMPTY] * len(pieces), strict=True))
        found = _shared(made, wholes, owners, group)
        return tuple(a.reshape(s) if a.size == math.prod(s) else a for a, s in zip(found, shapes, strict=True))

    def _close(self) -> None:
        if self._leaf is not None:
            push(self._nodes, self._leaf)
            self._leaf = None


def push(nodes: list[Node], node: Node) -> None:
    """Insert a node in the order of the leaves, and merge neighbors as long as two form a node of the next level."""
    place = bisect.bisect(nodes, node.index << node.level, key=lambda one: one.index << one.level)
    nodes.insert(place, node)
    while True:
        left = place - (node.index & 1)
        if not 0 <= left < len(nodes) - 1:
            return
        node, right = nodes[left], nodes[left + 1]
        if node.level != right.level or node.index ^ 1 != right.index:
            return
        _accumulate(node, nodes.pop(left + 1).arrays)
        node.level, node.index, place = node.level + 1, node.index // 2, left


def _makers(owners: Owners) -> range:
    """Return the processes that complete a piece of a sum each."""
    return owners.ranks if owners.cut else owners.ranks[:1]


def _pieces(array: Array, owners: Owners) -> list[Array]:
    """Return the pieces of an array that its owners complete."""
    count = len(_makers(owners))
    if count == 1:
        return [array]
    flat = array.reshape(-1)
    return [flat[flat.size * n // count : flat.size * (n + 1) // count] for n in range(count)]


def _shared(
    made: Mapping[tuple[int, int], Array], wholes: Sequence[Array], owners: Sequence[Owners], group: Group
) -> list[Array]:
    """Return all sums of this process; those of several owners are given to all of these.

    Args:
        made: complete pieces by number of the sum and process; those of other processes are empty.
        wholes: per sum, an array that is not needed any more, in which the pieces land if it has their size.
        owners: per sum.
        group: the processes.
    """
    found = [made[number, _makers(one)[-1]] for number, one in enumerate(owners)]
    shared = [number for number, one in enumerate(owners) if len(one.ranks) > 1]
    if not shared or group.rank not in owners[shared[0]].ranks:
        return found
    ranks = owners[shared[0]].ranks
    mine = {rank: [number for number in shared if rank in _makers(owners[number])] for rank in ranks}
    room = {(n, r): p for n in shared for r, p in zip(_makers(owners[n]), _pieces(wholes[n], owners[n]), strict=True)}
    places = {rank: [room[number, rank] for number in some] for rank, some in mine.items()}
    given = group.exchange([made[number, group.rank] for number in mine[group.rank]], len(ranks), places)
    for number in shared:
        parts = [(room[number, rank], given[rank][mine[rank].index(number)]) for rank in _makers(owners[number])]
        if any((place.size, place.dtype) != (part.size, part.dtype) for place, part in parts):
            found[number] = np.concatenate([part for _, part in parts])
            continue
        for place, part in parts:
            if not np.may_share_memory(place, part):
                place[...] = part
        found[number] = wholes[number]
    return found


def _accumulate(node: Node, arrays: Iterable[Array]) -> None:
    node.arrays = tuple(_plus(total, other) for total, other in zip(node.arrays, arrays, strict=True))


def _plus(total: Array, other: Array) -> Array:
    """Add, in place if both arrays have the same type, if both hold values; else return the one that does.

    Bytes are appended.
    """
    if not total.size or not other.size:
        return total if total.size else other
    if total.dtype == np.uint8:
        return np.concatenate([total, other])
    return np.add(total, other.reshape(total.shape), out=total if total.dtype == other.dtype else None)


def _each(total: int) -> int:
    """Return the number of batches per leaf."""
    return -(-total // min(LEAVES, max(FEWER, total // 4)))
