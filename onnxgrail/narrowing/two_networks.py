"""Runs the dense and the narrowed network side by side and sums over rows for the fits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.algebra.moments.cross import moments_of
from onnxgrail.algebra.moments.regression import Moments, zero_moments
from onnxgrail.algebra.moments.triangles import unpacked
from onnxgrail.calibration.devices.lanes import Lane
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime.threads import Step, pass_by, share
from onnxgrail.calibration.stream import rows
from onnxgrail.calibration.stream.cache import Beginning
from onnxgrail.calibration.stream.rows import Where
from onnxgrail.calibration.stream.sizes import bytes_left, scale_of
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.calibration.streaming import starts_of, stream_of
from onnxgrail.core import Array, Block, Bools, Feed, Floats, Ints, Recipe
from onnxgrail.graph.fittable.consumers import Consumer
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.group.sums import FIRST, Owners, Shard, Tally
from onnxgrail.machine.job import Job
from onnxgrail.machine.progress import Tick
from onnxgrail.narrowing.layers import Stage, stages_at

FOLDS, JUDGE = 4, 3  # folds of the samples, and the one that is held out: it judges what is fitted to the others
PARTS = 2  # of the sums: over these folds, and over that one
ROWS = 65536  # rows to fit on, or sixteen per regressor if that is more
SUMS = 6  # arrays per part of the rows

Side = tuple[Mapping[str, Array], Mapping[str, Array]]
"""Tensors of one batch in the dense and in the narrowed network."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """The dense and the narrowed network, moved forward side by side over the batches of this process.

    Attributes:
        untouched: the ledger of the dense network.
        starts: per batch of all processes, the number of its first sample.
        seed: of the random choice of rows.
        known: per batch, tensors of the dense network that need no run of it.
    """

    dense: Stream
    narrow: Stream
    untouched: Ledger
    starts: Ints
    seed: int
    known: Sequence[Mapping[str, Array]] = ()

    @contextmanager
    def following(self, stage: Stage, ledger: Ledger, end: int, ways: int) -> Iterator[Step[Side]]:
        """Give a function that computes a stage's targets and inputs for one batch.

        The narrowed stream moves on to this stage. The dense stream moves to `end` unless it holds the targets.

        Args:
            stage: the layers to fit.
            ledger: the narrowed network as decided so far.
            end: position to which the dense stream moves.
            ways: number of batches that run in parallel.
        """
        with self._targets(stage, end, ways) as goals, self._inputs(stage, ledger, ways) as found:
            yield lambda place: (goals(place), found(place))

    def _targets(self, stage: Stage, end: int, ways: int) -> AbstractContextManager[Step[Mapping[str, Array]]]:
        if self.known and any(all(name in found for name in stage.goals) for found in self.known):
            self._later(self.dense, lambda: self._computed(stage, end, ways), ways)
            return nullcontext(lambda place: self.known[place])
        return self._computed(stage, end, ways)

    def _computed(self, stage: Stage, end: int, ways: int) -> AbstractContextManager[Step[Mapping[str, Array]]]:
        there = 0 if self.dense.holds(stage.goals) else end
        return self.dense.following(stage.goals, self.untouched, there, ways)

    def _inputs(self, stage: Stage, ledger: Ledger, ways: int) -> AbstractContextManager[Step[dict[str, Array]]]:
        read = [stage.first.source, *(t.consumer.residual for t in stage.tasks if t.consumer.residual)]
        return self.narrow.following(list(dict.fromkeys(read)), ledger, stage.first.position, ways)

    def skip(self, stage: Stage, ledger: Ledger, end: int, tick: Tick) -> None:
        """Leave out what `sums` does with the same arguments, where the fit is known; each stream catches up alone."""
        ways = self._ways(stage)
        self._later(self.dense, lambda: self._computed(stage, end, ways), ways)
        self._later(self.narrow, lambda: self._inputs(stage, ledger, ways), ways)
        for _ in self.dense.shard.numbers:
            tick()

    def _later(self, stream: Stream, opened: Callable[[], AbstractContextManager[Step[Any]]], ways: int) -> None:
        """Leave out a walk of a stream until the stream is needed."""

        def passed() -> None:
            with opened() as step:
                pass_by(self.dense.shard, ways, step)

        stream.later(passed)

    def sums(self, stage: Stage, ledger: Ledger, end: int, tick: Tick, owners: Owners = FIRST) -> tuple[Floats, ...]:
        """Sum over the rows of every part; outputs of all layers are side by side.

        The last part is the fold that judges, the first one is all others.

        Args:
            stage: the layers to fit.
            ledger: the narrowed network as decided so far.
            end: position to which the dense stream moves.
            tick: called once per batch.
            owners: the processes that get the sums.

        Returns:
            `SUMS` arrays per part; they are empty in other processes.
        """

        def added(shard: Shard, walked: Iterator[Side]) -> Tally:
            tally = Tally(shard)
            groups = [lane.pairs(stage.features, stage.outputs) for _ in range(PARTS)]
            for number, side in zip(shard.numbers, walked, strict=True):
                self._add(groups, stage, number, side)
                if shard.closes(number, whole=lane.whole):
                    tally.add(number, (array for group in groups for array in group.drain()))
                tick()
            return tally

        ways, lane = self._ways(stage), self.dense.lane
        with self.following(stage, ledger, end, ways) as step:
            tally, *others = share(self.dense.shard, ways, step, added)
        tally.join(others)
        return tally.total([owners] * (PARTS * SUMS))

    def _ways(self, stage: Stage) -> int:
        columns = stage.tasks[0].inputs if stage.through else stage.outputs
        return self.dense.ways(12 * PARTS * stage.features * (stage.features + columns))

    def _add(self, groups: Sequence[Any], stage: Stage, number: int, side: Side) -> None:
        """Add the rows of one batch to their parts."""
        shard, lane, (goal, slim) = self.dense.shard, self.dense.lane, side
        if not _matching(stage, goal, slim):
            return
        mask = self.dense.masks[number - shard.numbers.start]
        wanted = rows_wanted(stage) // shard.total + 1
        rng = np.random.default_rng((self.seed, stage.first.position, number))
        shape = goal[stage.goals[0]].shape
        where = _real(rows.positions(shape, stage.first.made, wanted, rng), shape, mask)
        z = _inputs(lane, slim[stage.first.source], stage.first, shape, where)
        t = _targets(lane, stage, side, where)
        x = _inputs(lane, goal[stage.first.source], stage.first, shape, where) if stage.through else None
        if shard.total >= 2 * FOLDS:
            groups[number % FOLDS == JUDGE].add(z, t, x)
            return
        fold = _fold(rows.numbers(where, shape, stage.first.made), shape, stage, int(self.starts[number]))
        for part, group in enumerate(groups):
            mine = (fold == JUDGE) == part
            group.add(*(None if array is None else lane.compress(mine, array, 0) for array in (z, t, x)))


@contextmanager
def opened(
    prepared: Prepared, job: Job, beginning: Beginning | None, known: Sequence[Mapping[str, Array]]
) -> Iterator[Pair]:
    """Give the dense and the narrowed network before any decision; what they begin with is in memory once.

    Args:
        prepared: the model and its data.
        job: the options, the processes and the finished steps.
        beginning: a cut where both begin; None for the feeds.
        known: see `Pair`.
    """
    start = functools.partial(stream_of, prepared, job.recipe, job.group, share=2)
    with start(beginning=beginning) as dense, start(beginning=dense.place()) as narrow:
        starts = starts_of(dense, job.steps)
        yield Pair(dense, narrow, weights.empty(prepared.survey), starts, job.recipe.seed, known)


def rows_wanted(stage: Stage) -> int:
    """Return the number of rows that layers are fitted on, if there are so many."""
    return max(ROWS, 16 * stage.features)


def _matching(stage: Stage, goal: Mapping[str, Array], slim: Mapping[str, Array]) -> bool:
    """Return True if the batch has rows, and the same rows in both networks.

    A branch that the batch does not take has no rows. If values decide the number of rows (a routing, durations), the
    networks may differ, and the rows then don't correspond.
    """
    first = stage.first
    if stage.goals[0] not in goal or not math.prod(goal[stage.goals[0]].shape):
        return False
    source, like = slim[first.source], goal[stage.goals[0]]
    if first.window is not None:
        return (source.shape[0], *rows.places(source.shape[2:], first.window)) == (like.shape[0], *like.shape[2:])
    axes = (a for a in range(source.ndim) if a != first.axis)
    return bool([source.shape[a] for a in axes] == [n for a, n in enumerate(like.shape) if a != first.made])


def moments(sums: Sequence[Floats], stage: Stage, dense: Array | None) -> list[Moments]:
    """Convert the result of `Pair.sums` to moments per part; packed sums are freed one by one.

    Args:
        sums: `SUMS` arrays for every part.
        stage: the layers.
        dense: their original weights (inputs, outputs) in float32, side by side, if products with the dense input were
            summed.
    """
    left = list(sums)
    del sums
    found = []
    while left:
        gram, *others = left[:SUMS]
        del left[:SUMS]
        if not gram.size:
            found.append(zero_moments(stage.features, stage.outputs, dense))
            continue
        found.append(moments_of(unpacked(gram, stage.features), *others, dense=dense))
        del gram, others
    return found


def goals_of(prepared: Prepared, recipe: Recipe, blocks: Sequence[Block]) -> tuple[str, ...]:
    """Return the names of what all layers should compute that are fitted if these blocks are narrowed."""
    stages = stages_at(prepared, recipe, {block.name: block.units - 1 for block in blocks})
    return tuple(dict.fromkeys(name for stage in stages for name in stage.goals))


class Targets:
    """A memory of what layers of some models compute before any decision, for many fits to the same data."""

    def __init__(self, recipe: Recipe, most: int, models: Collection[ir.Model]) -> None:
        """Take the options, the bytes that may be kept per model and data, and the models."""
        self._recipe, self._most, self._models = recipe, most, models
        self._kept: dict[tuple[ir.Model, tuple[Callable[[], Feed], ...]], tuple[set[str], list[dict[str, Array]]]] = {}

    def of(self, prepared: Prepared, names: Iterable[str]) -> Sequence[Mapping[str, Array]]:
        """Return per batch the tensors of these names, and perhaps others.

        None of the names is there if they are too large, or for another model.
        """
        feeds = prepared.batches.feeds
        if prepared.model not in self._models:
            return [{} for _ in feeds]
        have, kept = self._kept.setdefault((prepared.model, feeds), (set(), [{} for _ in feeds]))
        fresh = [name for name in dict.fromkeys(names) if name not in have]
        if not fresh:
            return kept
        untouched, scale = weights.empty(prepared.survey), scale_of(prepared.batches, prepared.survey)
        size = sum(bytes_left(prepared.survey, name, untouched, scale) for name in (*have, *fresh))
        if size <= self._most:
            have.update(fresh)
            with stream_of(prepared, self._recipe) as stream:
                for batch, found in zip(kept, stream.record(fresh, untouched), strict=True):
                    batch.update(found)
        return kept


def _real(where: Where, shape: tuple[int, ...], mask: Bools | None) -> Where:
    """Return the positions of a target that are not padding."""
    if mask is None or shape[:-1] not in (mask.shape, (mask.size,)):
        return where
    real = np.asarray(mask).ravel()
    if isinstance(where, slice):
        return where if real.all() else np.flatnonzero(real)
    return where[real[where]]


def _inputs(lane: Lane, array: Array, consumer: Consumer, shape: tuple[int, ...], where: Where) -> Array:
    """Return a consumer's inputs (rows, features) in float32, for flat positions of its output of this shape."""
    if consumer.window is None:
        return lane.rows(array, consumer.axis, where)
    return rows.patches(lane.host(array), consumer.window, shape, where).astype(np.float32, copy=False)


def _targets(lane: Lane, stage: Stage, side: Side, where: Where) -> Array:
    """Return the dense outputs of all layers (rows, outputs), less the narrowed network's residual and bias."""
    goals, slim = side
    found = []
    for task in stage.tasks:
        goal = lane.rows(goals[task.goal], task.consumer.made, where)
        goal = goal if task.made.all() else lane.compress(task.made, goal, 1)
        if task.consumer.residual:
            goal = lane.minus(goal, lane.rows(slim[task.consumer.residual], task.consumer.made, where))
        found.append(lane.minus(goal, task.consumer.bias[task.made].astype(np.float32)))
    return found[0] if len(found) == 1 else lane.concatenate(found, 1)


def _fold(where: Ints, shape: tuple[int, ...], stage: Stage, first: int) -> Ints:
    """Return the fold of every row of a target: samples are assigned in turn, or rows if there is a single sample."""
    made = stage.first.made
    samples = shape[0] if made else 1
    each = max(1, math.prod(shape) // shape[made] // samples)
    sample = where // each + first
    return (sample if samples > 1 or first else where) % FOLDS
