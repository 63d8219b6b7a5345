"""The dense and the narrowed network side by side, and the sums over rows that layers are fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.fit.refit import Moments, zero_moments
from onnxgrail.algebra.moments.cross import Pairs, moments_of
from onnxgrail.algebra.solve.linear import linear
from onnxgrail.calibration.runtime.threads import Step, pass_by, share
from onnxgrail.calibration.stream import rows
from onnxgrail.calibration.stream.rows import Where
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.calibration.stream.totals import packed, whole
from onnxgrail.core import Array, Bools, Floats, Ints
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.group.sums import Shard, Tally
from onnxgrail.machine.progress import Tick
from onnxgrail.machine.steps.codec import Record
from onnxgrail.machine.steps.steps import Steps
from onnxgrail.narrowing.layers import Stage

FOLDS = 4  # of the samples; the last one is held out
ROWS = 65536  # rows looked at where that is more than sixteen per regressor
SUMS = 6  # arrays of one part of the rows

Side = tuple[dict[str, Array], dict[str, Array]]
"""Tensors of one batch in the dense and in the narrowed network."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """The dense and the narrowed network, brought forward side by side over the batches of this process.

    Attributes:
        untouched: the ledger of the dense one.
        starts: number of the first sample of each of all batches.
        seed: of the rows that are drawn.
    """

    dense: Stream
    narrow: Stream
    untouched: Ledger
    starts: Ints
    seed: int

    @contextmanager
    def following(self, stage: Stage, ledger: Ledger, end: int, ways: int) -> Iterator[Step[Side]]:
        """What makes of a batch what a stage is fitted to, and what it reads, where so many batches go side by side.

        The narrowed stream moves on to this stage, the dense one to `end`, unless what it is asked for is at hand.
        """
        names = stage.goals
        there = 0 if self.dense.holds(names) else end
        read = [stage.first.source, *(t.consumer.residual for t in stage.tasks if t.consumer.residual)]
        with (
            self.dense.following(names, self.untouched, there, ways) as goals,
            self.narrow.following(list(dict.fromkeys(read)), ledger, stage.first.position, ways) as found,
        ):
            yield lambda place: (goals(place), found(place))

    def walk_past(self, stage: Stage, ledger: Ledger, end: int, parts: int) -> None:
        """Bring both streams behind a stage that is known: in the very steps that would have measured it."""
        ways = self._ways(stage, parts)
        with self.following(stage, ledger, end, ways) as step:
            pass_by(self.dense.shard, ways, step)

    def sums(self, stage: Stage, ledger: Ledger, end: int, parts: int, tick: Tick) -> tuple[Floats, ...]:
        """Sums over the rows of every part, outputs of all layers side by side; nothing but in the first process.

        The last parts are single folds, the first one is all the others.  Streams move as in `following`.
        """

        def added(shard: Shard, walked: Iterator[Side]) -> Tally:
            tally = Tally(shard)
            groups = [Pairs(*_sizes(stage)) for _ in range(parts)]
            for number, side in zip(shard.numbers, walked, strict=True):
                self._add(groups, stage, number, side)
                if shard.closes(number):
                    tally.add(number, (array for group in groups for array in _travelling(group)))
                tick()
            return tally

        ways = self._ways(stage, parts)
        with self.following(stage, ledger, end, ways) as step:
            tally, *others = share(self.dense.shard, ways, step, added)
        tally.join(others)
        return tally.total()

    def _ways(self, stage: Stage, parts: int) -> int:
        features, _, inputs = _sizes(stage)
        return self.dense.ways(12 * parts * features * (features + inputs))

    def _add(self, groups: Sequence[Pairs], stage: Stage, number: int, side: Side) -> None:
        """Add the rows of one batch to the part that each is in."""
        shard, (goal, slim) = self.dense.shard, side
        if not _matching(stage, goal, slim):
            return
        mask = self.dense.masks[number - shard.numbers.start]
        wanted = max(ROWS, 16 * stage.features) // shard.total + 1
        rng = np.random.default_rng((self.seed, stage.first.position, number))
        like, parts = goal[stage.goals[0]], len(groups)
        where = _real(rows.positions(like.shape, stage.first.made, wanted, rng), like, mask)
        z = rows.inputs(slim[stage.first.source], stage.first, like.shape, where).astype(np.float32, copy=False)
        t = _targets(stage, goal, slim, where, len(z))
        x = None
        if stage.through:
            x = rows.inputs(goal[stage.first.source], stage.first, like.shape, where).astype(np.float32, copy=False)
        if shard.total >= 2 * FOLDS:
            groups[max(number % FOLDS - FOLDS + parts, 0)].add(z, t, x)
            return
        fold = _fold(rows.numbers(where, like.shape, stage.first.made), like, stage, int(self.starts[number]))
        for part, group in enumerate(groups):
            mine = np.maximum(fold - FOLDS + parts, 0) == part
            group.add(z[mine], t[mine], None if x is None else x[mine])
            group.take()  # so that one part only is there twice, in float32 as well


def _matching(stage: Stage, goal: Mapping[str, Array], slim: Mapping[str, Array]) -> bool:
    """Whether both networks have the same rows, and any; where values decide how many (a routing), they may not.

    There are none in a branch that the batch does not take.

    Then no row of one says what a row of the other should be.
    """
    first = stage.first
    if stage.goals[0] not in goal or not goal[stage.goals[0]].size:
        return False
    source, like = slim[first.source], goal[stage.goals[0]]
    if first.window is not None:
        return bool(source.shape[0] == like.shape[0])
    axes = (a for a in range(source.ndim) if a != first.axis)
    return bool([source.shape[a] for a in axes] == [n for a, n in enumerate(like.shape) if a != first.made])


def _sizes(stage: Stage) -> tuple[int, int, int]:
    """Of a stage: regressors, targets, and what sums are taken with."""
    return stage.features, stage.outputs, stage.tasks[0].inputs if stage.through else stage.outputs


def moments(sums: Sequence[Floats], stage: Stage, dense: Floats | None) -> list[Moments]:
    """What `Pair.sums` gave, per part; packed sums are let go one by one.

    Args:
        sums: for every part.
        stage: the layers.
        dense: their original weights (inputs, outputs), side by side, where sums are taken with their input.
    """
    left = list(sums)
    del sums
    found = []
    while left:
        gram, cross, *others = left[:SUMS]
        del left[:SUMS]
        if not gram.size:
            found.append(zero_moments(stage.features, stage.outputs))
            continue
        if dense is not None:
            cross = linear().product(cross.reshape(stage.features, -1), dense)
        found.append(moments_of(whole(gram, stage.features), cross, *others))
        del gram, cross, others
    return found


def _travelling(group: Pairs) -> tuple[Floats, ...]:
    gram, *others = group.drain()
    return packed(gram), *others


def starts_of(stream: Stream, inputs: Iterable[str], untouched: Ledger, steps: Steps) -> Ints:
    """The number of the first sample of every batch, known to all processes; the stream has not moved yet."""
    tally = Tally(stream.shard)
    for number, feed in zip(stream.shard.numbers, stream.record(list(inputs), untouched), strict=True):
        sizes = {a.shape[0] if a.ndim else 1 for a in feed.values()}
        row = np.zeros(stream.shard.total)
        row[number] = sizes.pop() if len(sizes) == 1 else 1
        tally.add(number, [row])
    found = tally.total()
    sizes_of_all = steps.shared(lambda: Record(arrays={"sizes": found[0]})).arrays["sizes"]
    return np.cumsum(sizes_of_all).astype(np.int64) - sizes_of_all.astype(np.int64)


def _real(where: Where, target: Array, mask: Bools | None) -> Where:
    """Positions that are not padding."""
    if mask is None or target.shape[:-1] not in (mask.shape, (mask.size,)):
        return where
    real = np.asarray(mask).ravel()
    if isinstance(where, slice):
        return where if real.all() else np.flatnonzero(real)
    return where[real[where]]


def _targets(stage: Stage, goals: Mapping[str, Array], slim: Mapping[str, Array], where: Where, count: int) -> Array:
    """What the dense network has, less the residual and the bias that are there already: (rows, outputs) of all."""
    found = np.empty((count, stage.outputs), np.float32)
    first = 0
    for task in stage.tasks:
        mine = found[:, first : (first := first + task.outputs)]
        goal = rows.outputs(goals[task.goal], task.consumer.made, where)
        mine[...] = goal if task.made.all() else np.take(goal, np.flatnonzero(task.made), axis=1)
        if task.consumer.residual:
            mine -= rows.outputs(slim[task.consumer.residual], task.consumer.made, where)
        mine -= task.consumer.bias[task.made].astype(np.float32)
    return found


def _fold(where: Ints, target: Array, stage: Stage, first: int) -> Ints:
    """Which fold every row is in: samples go round, or rows of an only sample."""
    made = stage.first.made
    samples = target.shape[0] if made else 1
    each = max(1, target.size // target.shape[made] // samples)
    sample = where // each + first
    return (sample if samples > 1 or first else where) % FOLDS
