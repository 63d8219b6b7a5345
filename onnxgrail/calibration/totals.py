"""Second moments summed over the batches of all processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from onnxgrail.core import Floats, Probe, Stats
from onnxgrail.parallel import Shard, Tally

WIDE = 2048  # from here on partial sums are kept as triangles: half the memory, for a copy of each


class Totals:
    """Sums of several probes at once."""

    def __init__(self, shard: Shard, probes: Sequence[Probe]) -> None:
        self._tally, self._spare = Tally(shard), shard.spare
        self._widths = [probe.width for probe in probes]

    def add(self, batch: int, sums: Iterable[Stats]) -> None:
        """Add what one batch gives, one per probe; the arrays are taken over."""
        if not self._spare:
            self._tally.add(batch, (array for stats in sums for array in _arrays(stats)))

    def stats(self) -> tuple[Stats, ...]:
        """One per probe in the first process; nothing in the others.  All processes must come here."""
        parts = iter(self._tally.total())
        return tuple(
            Stats(gram=unpacked(gram, width), total=total, count=int(count[0]))
            for width, gram, total, count in zip(self._widths, parts, parts, parts, strict=False)
        )


def _arrays(stats: Stats) -> tuple[Floats, Floats, Floats]:
    return packed(stats.gram), stats.total, np.array([stats.count], np.float64)


def packed(gram: Floats) -> Floats:
    """A wide symmetric matrix as its upper triangle, row by row; a narrow one as it is."""
    width = len(gram)
    if width < WIDE:
        return gram
    ends = np.cumsum(np.arange(width, 0, -1))
    triangle = np.empty(ends[-1])
    for row, end in enumerate(ends):
        triangle[end - width + row : end] = gram[row, row:]
    return triangle


def unpacked(part: Floats, width: int) -> Floats:
    """The matrix that `packed` was given."""
    if part.ndim == 2:
        return part
    gram = np.empty((width, width))
    ends = np.cumsum(np.arange(width, 0, -1))
    for row, end in enumerate(ends):
        gram[row, row:] = gram[row:, row] = part[end - width + row : end]
    return gram
