"""Sums over calibration batches that come out the same, bit for bit, in however many processes they are taken.

Floating sums depend on their order, so there is one order for all: batches are cut into equal stretches of four or
more (of fewer where there are few), a stretch is summed in the order of its batches, and stretches are the leaves of a
binary tree.  A process owns neighbouring leaves; the partial sums it cannot finish alone are exactly nodes of that
tree, and go to the others.
At any time only a logarithmic number of partial sums exists.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from onnxgrail.core import Floats
from onnxgrail.machine.steps.codec import Record

LEAVES = 32  # more processes than this cannot share the work
FEWER = 4  # stretches that a few batches are cut into: every one costs a sum of its own


@dataclass(slots=True, eq=False)
class Node:
    """Sums over the leaves from `index * 2**level` on, `2**level` of them (fewer at the end)."""

    level: int
    index: int
    arrays: tuple[Floats, ...]


class Group(Protocol):
    """The processes that work on one job; they all do the same, on different batches, and the first one decides."""

    @property
    def rank(self) -> int:
        """Number of this process; 0 decides, writes and prints."""

    @property
    def size(self) -> int:
        """How many processes there are."""

    def collect(self, nodes: list[Node]) -> None:
        """Bring the partial sums of all processes together in the first one."""

    def share(self, record: Record | None) -> Record | None:
        """What the first process passes, on every process."""


class Solo:
    """The group of a single process."""

    rank, size = 0, 1

    def collect(self, nodes: list[Node]) -> None:
        """Everything is here already."""

    def share(self, record: Record | None) -> Record | None:
        """What was passed."""
        return record


SOLO = Solo()


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The part of the batches that one process works on.

    Attributes:
        group: the processes.
        total: number of all batches.
        numbers: of the batches of this process.
        spare: there was nothing left for it; it goes through the motions with the first batch and adds nothing.
    """

    group: Group
    total: int
    numbers: range
    spare: bool = False

    @property
    def each(self) -> int:
        """Batches of one leaf of the sums; the last leaf may have fewer."""
        return _each(self.total)

    def closes(self, number: int) -> bool:
        """Whether a batch is the last one of its leaf."""
        return (number + 1) % self.each == 0 or number + 1 == self.total

    @property
    def leaves(self) -> int:
        """How many leaves all batches make."""
        return -(-self.total // self.each)

    def split(self, ways: int) -> list[Shard]:
        """At most so many parts of neighbouring leaves, as equal as whole leaves allow, in the order of the batches."""
        leaves = -(-len(self.numbers) // self.each)
        ways = min(ways, leaves)
        starts = (self.numbers.start + -(-leaves * way // ways) * self.each for way in range(ways + 1))
        ends = [min(start, self.numbers.stop) for start in starts]
        return [replace(self, numbers=range(a, b)) for a, b in itertools.pairwise(ends)]


def shard_of(group: Group, total: int) -> Shard:
    """The part of `total` batches that this process works on: neighbouring leaves, as equal as whole leaves allow."""
    each = _each(total)
    leaves = -(-total // each)
    first, last = (-(-leaves * rank // group.size) * each for rank in (group.rank, group.rank + 1))
    numbers = range(first, min(last, total))
    return Shard(group, total, numbers or range(1), spare=not numbers)


class Tally:
    """Sums arrays over the batches of all processes."""

    def __init__(self, shard: Shard) -> None:
        self._shard, self._each = shard, shard.each
        self._nodes: list[Node] = []
        self._leaf: Node | None = None

    def add(self, number: int, arrays: Iterable[Floats]) -> None:
        """Add what batch `number` gives: always as many arrays, of the same shapes or empty where there is nothing.

        Batches come in their order, each once.  The arrays are the tally's from now on.
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
        """Take over the sums of the batches that follow, from others of this process."""
        self._close()
        for other in others:
            other._close()
            for node in other._nodes:
                push(self._nodes, node)
            other._nodes = []

    def total(self) -> tuple[Floats, ...]:
        """The sums, in the first process; nothing in the others.  All processes must come here.

        What was empty in the first batches may come flat.
        """
        self._close()
        nodes, self._nodes = self._nodes, []
        shapes = [array.shape for array in nodes[0].arrays] if nodes else []
        self._shard.group.collect(nodes)
        if self._shard.group.rank != 0:
            return ()
        while len(nodes) > 1:  # the right edge of the tree, from the bottom
            last = nodes.pop()
            _accumulate(nodes[-1], last.arrays)
        whole = zip(nodes[0].arrays, shapes, strict=True)
        return tuple(a.reshape(shape) if a.size == math.prod(shape) else a for a, shape in whole)

    def _close(self) -> None:
        if self._leaf is not None:
            push(self._nodes, self._leaf)
            self._leaf = None


def push(nodes: list[Node], node: Node) -> None:
    """Put a node behind its left neighbours, and join what makes a whole node of the next level."""
    nodes.append(node)
    while len(nodes) > 1 and nodes[-2].level == nodes[-1].level and nodes[-2].index ^ 1 == nodes[-1].index:
        last = nodes.pop()
        left = nodes[-1]
        _accumulate(left, last.arrays)
        left.level, left.index = left.level + 1, left.index // 2


def _accumulate(node: Node, arrays: Iterable[Floats]) -> None:
    node.arrays = tuple(_plus(total, other) for total, other in zip(node.arrays, arrays, strict=True))


def _plus(total: Floats, other: Floats) -> Floats:
    """In place where both hold something."""
    if not total.size or not other.size:
        return total if total.size else other
    return np.add(total, other.reshape(total.shape), out=total)


def _each(total: int) -> int:
    """Batches of one leaf."""
    return -(-total // min(LEAVES, max(FEWER, total // 4)))
