"""Sums over calibration batches that are equal, bit for bit, for any number of processes.

Floating-point sums depend on their order, so the order is fixed: batches are cut into equal stretches of four or more
(fewer if there are few batches), a stretch is summed in the order of its batches, and stretches are the leaves of a
binary tree.  A process owns neighboring leaves; the partial sums that it cannot complete alone are nodes of that tree
and are sent to other processes.  At any time only a logarithmic number of partial sums exists.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from onnxgrail.core import Array, Floats
from onnxgrail.machine.steps.codec import Record

LEAVES = 32  # upper limit on the number of processes that can share the work
FEWER = 4  # number of stretches for few batches: each stretch costs a sum of its own


@dataclass(slots=True, eq=False)
class Node:
    """Sums over the leaves `index * 2**level` and following, `2**level` of them (fewer at the end)."""

    level: int
    index: int
    arrays: tuple[Array, ...]


class Group(Protocol):
    """The processes that work on a job; all do the same on different batches, and the first process decides."""

    @property
    def rank(self) -> int:
        """Return the number of this process; process 0 decides, writes and prints."""

    @property
    def size(self) -> int:
        """Return the number of processes."""

    def collect(self, nodes: list[Node]) -> None:
        """Combine the partial sums of all processes in the first process."""

    def share(self, record: Record | None) -> Record | None:
        """Return the first process's record on every process."""


class Solo:
    """The group of a single process."""

    rank, size = 0, 1

    def collect(self, nodes: list[Node]) -> None:
        """Do nothing: a single process has all sums already."""

    def share(self, record: Record | None) -> Record | None:
        """Return the record unchanged."""
        return record


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

    def closes(self, number: int) -> bool:
        """Return True if a batch is the last one of its leaf."""
        return (number + 1) % self.each == 0 or number + 1 == self.total

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

    def total(self) -> tuple[Floats, ...]:
        """Return the sums in the first process, an empty tuple in the others.  All processes must call it.

        An array that was empty in this process's first batches may be returned flat.
        """
        self._close()
        nodes, self._nodes = self._nodes, []
        shapes = [array.shape for array in nodes[0].arrays] if nodes else []
        self._shard.group.collect(nodes)
        if self._shard.group.rank != 0:
            return ()
        while len(nodes) > 1:  # the right edge of the tree, bottom up
            last = nodes.pop()
            _accumulate(nodes[-1], last.arrays)
        whole = zip(nodes[0].arrays, shapes, strict=True)
        return tuple(a.reshape(shape) if a.size == math.prod(shape) else a for a, shape in whole)

    def _close(self) -> None:
        if self._leaf is not None:
            push(self._nodes, self._leaf)
            self._leaf = None


def push(nodes: list[Node], node: Node) -> None:
    """Append a node, and merge it with its left neighbor as long as both form a node of the next level."""
    nodes.append(node)
    while len(nodes) > 1 and nodes[-2].level == nodes[-1].level and nodes[-2].index ^ 1 == nodes[-1].index:
        last = nodes.pop()
        left = nodes[-1]
        _accumulate(left, last.arrays)
        left.level, left.index = left.level + 1, left.index // 2


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
