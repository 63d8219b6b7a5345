"""Channel labels: positions of tensors with the same label class are kept or removed together.

A `Mark` puts one label on every position of one axis of a tensor, or on every cell of several axes together (two axes
that a Reshape made of one).  An element is removed when the label of any mark at its coordinates is removed.
`Labels` keeps the equivalence classes.  Label 0 is permanent: it is never removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.core import Bools, Ints, Refusal

TIED = "all positions depend on each other, so none can go alone"
PIECES = "go only in pieces that would not leave a rectangular tensor"
UNALIGNED = "do not line up one to one"
SYMPTOMS = (TIED, PIECES, UNALIGNED)  # symptoms of channels that were tied together at another node


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """Labels on the cells of `axes` (ascending, not negative); `labels.shape` holds the sizes of these axes."""

    axes: tuple[int, ...]
    labels: Ints

    def on(self, axes: Sequence[int], sizes: Sequence[int]) -> Ints:
        """Broadcast the labels to a superset of the axes, given the sizes of that superset."""
        shape = [size if axis in self.axes else 1 for axis, size in zip(axes, sizes, strict=True)]
        return np.broadcast_to(self.labels.reshape(shape), tuple(sizes))

    def moved(self, axes: Sequence[int]) -> Mark:
        """Return the mark on other axes, one for each of its own; their order may change."""
        return Mark(tuple(sorted(axes)), self.labels.transpose(np.argsort(axes)))

    def along(self, axis: int) -> int:
        """Return the position of a tensor axis among the mark's axes."""
        return self.axes.index(axis)


def narrowed_shape(shape: Sequence[int], marks: Iterable[Mark], dead: Bools) -> tuple[int, ...]:
    """Return a tensor's shape without the dead units.

    Args:
        shape: the full shape.
        marks: unit numbers, one mark per narrowed axis.
        dead: (ids,) mask of removed units.
    """
    dims = list(shape)
    for mark in marks:
        dims[mark.axes[0]] = int((~dead[mark.labels]).sum())
    return tuple(dims)


class Labels:
    """A vectorized union-find over integer labels."""

    def __init__(self) -> None:
        self._parent = np.zeros(1024, dtype=np.int64)
        self._count = 1
        self._frozen: list[tuple[Ints, Refusal]] = []
        self._tied: list[tuple[Ints, int, Refusal]] = []  # members of the class, number of freezes so far, reason

    def fresh(self, count: int) -> Ints:
        """Create new labels, each in a class of its own."""
        start, stop = self._count, self._count + count
        if stop > len(self._parent):
            grown = np.zeros(max(stop, 2 * len(self._parent)), dtype=np.int64)
            grown[:start] = self._parent[:start]
            self._parent = grown
        self._parent[start:stop] = np.arange(start, stop)
        self._count = stop
        return np.arange(start, stop, dtype=np.int64)

    def find(self, labels: Ints) -> Ints:
        """Return the representative of every label's class: the smallest member."""
        root = self._parent[labels]
        while True:
            above = self._parent[root]
            if np.array_equal(above, root):
                break
            root = above
        self._parent[labels] = root
        return root

    def union(self, a: Ints, b: Ints, why: Refusal, tie: Refusal | None = None) -> None:
        """Merge classes elementwise (broadcasting); classes merged with the permanent label are frozen.

        Args:
            a: labels.
            b: labels of a shape that broadcasts with `a`.
            why: the reason, if the merge freezes a class.
            tie: the reason why positions of one tensor depend on each other, if this merge makes them so.
        """
        a, b = np.broadcast_arrays(a, b)
        pairs = np.unique(np.stack([a.ravel(), b.ravel()], axis=1), axis=0)
        permanent = (pairs == 0).any(axis=1)
        if permanent.any():
            self.freeze(pairs[permanent].ravel(), why)
        pairs = pairs[~permanent]
        while True:
            roots = self.find(pairs)
            pairs = roots[roots[:, 0] != roots[:, 1]]
            if not len(pairs):
                return
            if tie is not None:
                self._tied.append((np.unique(pairs[:, 0]), len(self._frozen), tie))
                tie = None
            self._parent[pairs.max(axis=1)] = pairs.min(axis=1)

    def freeze(self, labels: Ints, why: Refusal) -> None:
        """Make classes permanent and record the reason."""
        found = np.unique(labels)
        found = found[found > 0]
        if len(found):
            self._frozen.append((found, why))

    def frozen(self) -> dict[int, Refusal]:
        """Return the root of every permanent class with the first recorded reason."""
        reasons: dict[int, Refusal] = {}
        for labels, why in self._frozen:
            for root in np.unique(self.find(labels)).tolist():
                reasons.setdefault(root, why)
        return reasons

    def ties(self) -> dict[int, Refusal]:
        """Return, by root, the last tie that enlarged a class before it became permanent."""
        first: dict[int, int] = {}
        for number, (labels, _) in enumerate(self._frozen):
            for root in np.unique(self.find(labels)).tolist():
                first.setdefault(root, number)
        return {
            root: why
            for labels, number, why in self._tied
            for root in np.unique(self.find(labels)).tolist()
            if number <= first.get(root, -1)
        }

    def normal(self, mark: Mark, why: Refusal) -> Mark | None:
        """Replace labels by representatives and drop the axes along which the mark does not vary.

        Returns:
            The mark; None if it has no channels, or does not vary at all: then removing its one class would empty the
            tensor, so the class is frozen.
        """
        if not mark.labels.size:
            return None
        labels, axes = self.find(mark.labels), list(mark.axes)
        for position in reversed(range(len(axes))):
            if (labels == np.take(labels, [0], axis=position)).all():
                labels = np.take(labels, 0, axis=position)
                del axes[position]
        if axes:
            return Mark(tuple(axes), labels)
        self.freeze(labels.reshape(1), why)
        return None

    def tie(self, mark: Mark, axes: Sequence[int], why: Refusal) -> Mark | None:
        """Merge all labels along tensor axes, so that no position can be removed alone.

        Returns:
            The mark; None if it no longer varies.  If it still varies along these axes, because permanent labels do not
            merge, its labels are frozen and None is returned too.
        """
        for position in [mark.along(a) for a in axes if a in mark.axes and mark.labels.size]:
            self.union(np.take(mark.labels, [0], axis=position), mark.labels, why, why)
        tied = self.normal(mark, why)
        if tied is not None and set(tied.axes) & set(axes):
            self.freeze(tied.labels, why)
            return None
        return tied


def cause(stuck: Refusal, producers: Sequence[Ints], ties: Mapping[int, Refusal]) -> Refusal:
    """Return the tie that merged all channels of a weight, if the refusal names only a symptom; else the refusal.

    Args:
        stuck: the refusal as first recorded.
        producers: per weight that produces the channels, the label class of every position.
        ties: by class, the last tie before the class became permanent.
    """
    if not any(symptom in stuck.reason for symptom in SYMPTOMS):
        return stuck
    whole = {int(roots[0]) for roots in producers if roots.size > 1 and (roots == roots[0]).all()}
    return next((ties[root] for root in sorted(whole) if root in ties), stuck)
