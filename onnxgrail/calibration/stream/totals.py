"""Second moments summed over the batches of all processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from onnxgrail.algebra.moments.cross import TOGETHER
from onnxgrail.algebra.moments.gram import stats_of
from onnxgrail.algebra.moments.triangles import unpacked
from onnxgrail.calibration.devices.lanes import HOST, Lane
from onnxgrail.core import Array, Bools, Floats, Probe, Stats
from onnxgrail.machine.group.sums import FIRST, Owners, Shard, Tally

Part = tuple[Array, Probe, Bools | None]
"""An activation, the probe with indices placed in it, and the mask of valid rows."""


class Totals:
    """Accumulators of the second moments of several probes.

    A few thousand rows are summed in one triangle per probe, which is added to the leaf's triangle in float64. The
    tally adds the leaves, and the upper half is filled in at the end.  A lane with `whole` set makes one leaf of all
    batches.
    """

    def __init__(self, shard: Shard, probes: Sequence[Probe], lane: Lane = HOST) -> None:
        self._shard, self._tally, self._probes, self._whole = shard, Tally(shard), tuple(probes), lane.whole
        self._group, self._leaf = ([lane.sums(probe) for probe in probes] for _ in range(2))

    def add(self, batch: int, found: Iterable[Iterable[Part]]) -> None:
        """Add one batch.

        Raises:
            DataError: an activation is not finite.
        """
        if self._shard.spare:
            return
        last = self._shard.closes(batch, whole=self._whole)
        for leaf, group, parts in zip(self._leaf, self._group, found, strict=True):
            for array, placed, rows in parts:
                group.add(array, placed, rows)
            if last or group.count >= TOGETHER:
                leaf.take(group)
        if last:
            self._tally.add(batch, (array for leaf in self._leaf for array in _arrays(leaf)))

    def join(self, others: Iterable[Totals]) -> None:
        """Add the sums of other accumulators, whose batches follow."""
        self._tally.join(other._tally for other in others)

    def stats(self, owners: Sequence[Owners] | None = None) -> tuple[Stats | None, ...]:
        """Return the statistics of each probe, None for those of other processes.

        All processes must call it.

        Args:
            owners: per probe, the processes that get its statistics; None for the first process.

        Raises:
            DataError: a sum is not finite.
        """
        owners = [FIRST] * len(self._probes) if owners is None else owners
        kinds = [o for probe, one in zip(self._probes, owners, strict=True) for o in _owners(probe, one)]
        sums = iter(self._tally.total(kinds))
        parts = [list(islice(sums, 4 if probe.few else 3)) for probe in self._probes]
        rank = self._shard.group.rank
        return tuple(
            _stats(probe, *part) if rank in one.ranks else None
            for probe, part, one in zip(self._probes, parts, owners, strict=True)
        )


def _owners(probe: Probe, owners: Owners) -> list[Owners]:
    """Return the owners of each array of a probe; rows are bytes, which cannot be completed in pieces."""
    return [owners] * 3 + [replace(owners, cut=False)] * probe.few


def _arrays(leaf: Any) -> tuple[Array, ...]:
    half, total, count, *rows = leaf.drain()
    return half, total, np.array([count], np.float64), *rows


def _stats(probe: Probe, gram: Array, total: Floats, count: Floats, rows: Array | None = None) -> Stats:
    return stats_of(probe, gram if probe.alone else unpacked(gram, probe.width), total, int(count[0]), rows)
