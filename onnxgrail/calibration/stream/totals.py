"""Second moments summed over the batches of all processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from onnxgrail.algebra.moments.gram import stats_of
from onnxgrail.algebra.moments.triangles import mirrored
from onnxgrail.calibration.devices.lanes import HOST, Lane
from onnxgrail.core import Array, Bools, Floats, Probe, Stats
from onnxgrail.machine.group.sums import Shard, Tally

GROUP = 4  # batches whose sums are made together, counted from the start of a leaf of the tally
WIDE = 2048  # from here on partial sums are kept as triangles: half the memory, for a copy of each

Part = tuple[Array, Probe, Bools | None]
"""An activation with the probe as it lies there, and the rows that count."""


class Totals:
    """Sums of several probes at once.

    The sums of every `GROUP` batches are made in one triangle per probe and moved into that of the leaf, in float64;
    leaves are added up as the tally says, and the lower half is filled in at the end.  A lane may take all batches of
    a process as one leaf.
    """

    def __init__(self, shard: Shard, probes: Sequence[Probe], lane: Lane = HOST) -> None:
        self._shard, self._tally, self._probes, self._whole = shard, Tally(shard), tuple(probes), lane.whole
        self._group, self._leaf = ([lane.sums(probe) for probe in probes] for _ in range(2))

    def add(self, batch: int, found: Iterable[Iterable[Part]]) -> None:
        """Add what one batch gives: per probe one part or more.

        Raises:
            DataError: an activation is not finite.
        """
        if self._shard.spare:
            return
        for sums, parts in zip(self._group, found, strict=True):
            for array, placed, rows in parts:
                sums.add(array, placed, rows)
        last = batch == self._shard.numbers[-1] or (self._shard.closes(batch) and not self._whole)
        if last or (batch % self._shard.each + 1) % GROUP == 0:
            for leaf, group in zip(self._leaf, self._group, strict=True):
                leaf.take(group)
        if last:
            self._tally.add(batch, (array for leaf in self._leaf for array in _arrays(leaf)))

    def join(self, others: Iterable[Totals]) -> None:
        """Take over what others added up from the batches that follow."""
        self._tally.join(other._tally for other in others)

    def stats(self) -> tuple[Stats, ...]:
        """One per probe in the first process; nothing in the others.  All processes must come here.

        Raises:
            DataError: a sum is not finite.
        """
        parts = iter(self._tally.total())
        return tuple(
            stats_of(probe, gram if probe.alone else whole(gram, probe.width), total, int(count[0]))
            for probe, gram, total, count in zip(self._probes, parts, parts, parts, strict=False)
        )


def _arrays(leaf: Any) -> tuple[Floats, Floats, Floats]:
    half, total, count = leaf.drain()
    return half if half.ndim == 1 else packed(half), total, np.array([count], np.float64)


def whole(part: Floats, width: int) -> Floats:
    """The symmetric matrix (width, width) of a lower triangle, `packed` or not, which is written over."""
    return mirrored(part if part.ndim == 2 else unpacked(part, width))


def packed(gram: Floats) -> Floats:
    """The lower triangle of a wide matrix (h, h), row by row in (h (h + 1) / 2,); a narrow matrix as it is."""
    width = len(gram)
    if width < WIDE:
        return gram
    ends = np.cumsum(np.arange(1, width + 1))
    triangle = np.empty(ends[-1])
    for row, end in enumerate(ends):
        triangle[end - row - 1 : end] = gram[row, : row + 1]
    return triangle


def unpacked(part: Floats, width: int) -> Floats:
    """The lower triangle (width, width) that was `packed`."""
    gram = np.zeros((width, width))
    ends = np.cumsum(np.arange(1, width + 1))
    for row, end in enumerate(ends):
        gram[row, : row + 1] = part[end - row - 1 : end]
    return gram
