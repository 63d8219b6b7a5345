"""The second half of `--compensate best`: with all widths decided, every layer is fitted to the dense network.

Two streams walk the network side by side, the dense one and the narrowed one.  Matrices and convolutions are fitted in
the order of the network, each behind the ones already fitted, to what the dense network has there: those that lost
inputs, and those that kept them all but read what is no longer as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from onnxgrail import slots
from onnxgrail.additions import of_addition, with_addition
from onnxgrail.algebra.formats import MATERIAL
from onnxgrail.algebra.refit import MARGIN, Fitted, Moments, moments, refit
from onnxgrail.calibration import rows
from onnxgrail.calibration.stream import Stream
from onnxgrail.calibration.totals import packed, unpacked
from onnxgrail.core import Array, Bools, Floats, Ints, Recipe
from onnxgrail.graph import weights
from onnxgrail.graph.consumers import Consumer, behind, consumers
from onnxgrail.graph.survey import Ledger
from onnxgrail.once import Once
from onnxgrail.parallel import Tally
from onnxgrail.preparation import Prepared, stream_of
from onnxgrail.record import Record

FOLDS = 4  # of the samples; the last one is held out
FEW = 64  # with fewer samples than that the folds are held out in turn, and every one of them must gain
SURE = 0.1  # share of the held-out error that a choice must win then
FEATURES = 8192  # a layer with more regressors keeps the weights it has
NUMBERS = 1 << 26  # and so does one with more weights
ROWS = 65536  # rows looked at where that is more than sixteen per regressor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Guard:
    """What a choice must win on held-out rows; `judges` as in `refit`."""

    judges: int
    margin: float

    @property
    def parts(self) -> int:
        """How many sums are kept apart: one per judge, and one of all the other folds."""
        return min(self.judges + 1, FOLDS)


EVERY, LAST = _Guard(judges=FOLDS, margin=SURE), _Guard(judges=1, margin=MARGIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refit:
    """One fitted layer, for the report: errors are shares of the target's energy on held-out rows."""

    node: str
    weight: str
    alpha: float | None
    blend: float
    before: float
    after: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Task:
    """A layer with what stays of its weight: inputs kept, outputs made; and whether its bias may move."""

    consumer: Consumer
    kept: Bools
    made: Bools
    affine: bool

    @property
    def features(self) -> int:
        """How many regressors the kept inputs make."""
        window = self.consumer.window
        return int(self.kept.sum()) * (math.prod(window.kernel) if window is not None else 1)

    @property
    def rows(self) -> tuple[object, ...]:
        """What layers share that are fitted on the same rows."""
        return self.consumer.source, self.consumer.window, self.consumer.made, self.affine

    @property
    def goal(self) -> str:
        """The tensor that is to become as in the dense network."""
        return self.consumer.total or self.consumer.output


@dataclass(frozen=True, slots=True, eq=False)
class _Stage:
    """Layers that are fitted on the same rows, and the node where the next ones are (0 behind the last)."""

    tasks: tuple[_Task, ...]
    end: int

    @property
    def first(self) -> Consumer:
        """The layer that stands for all in what they share."""
        return self.tasks[0].consumer

    @property
    def key(self) -> str:
        """Under what the fits are kept."""
        return f"fit {self.first.position} {self.first.node}"


def sweep(prepared: Prepared, recipe: Recipe, ledger: Ledger, once: Once) -> tuple[Ledger, tuple[Refit, ...], float]:
    """Fit every matrix and convolution that lost inputs, or that reads what has changed.

    All processes add up rows, the first one fits.  Where fits are known already nothing is measured, and both streams
    follow when they are needed again.

    Returns:
        The ledger with fitted weights and shifted biases, one entry per layer, seconds in ONNX Runtime.
    """
    stages = _stages(_tasks(prepared, recipe, ledger))
    if not stages:
        return ledger, (), 0.0
    guard = EVERY if prepared.batches.samples < FEW else LAST
    report: list[Refit] = []
    known: list[tuple[_Stage, Ledger]] = []
    with ExitStack() as stack:
        opened = (stream_of(prepared, recipe, once.group, share=2) for _ in range(2))
        dense, narrow = (stack.enter_context(stream) for stream in opened)
        untouched = weights.empty(prepared.survey)
        pair = _Pair(dense, narrow, untouched, _starts(prepared, dense, untouched, once), recipe.seed)
        for stage in stages:
            found = once.known(stage.key)
            if found is not None:
                known.append((stage, ledger))
            else:
                while known:
                    pair.walk_past(*known.pop(0))
                sums = [pair.sums(stage, ledger, guard.parts)]  # handed on, not held while the next ones add up
                found = once.make(stage.key, functools.partial(_fitted, prepared, recipe, stage, ledger, sums, guard))
            ledger = with_addition(ledger, found, prepared.model)
            report += [Refit(**row) for row in found.notes["refits"]]
        return ledger, tuple(report), dense.forward + narrow.forward


def _fitted(
    prepared: Prepared, recipe: Recipe, stage: _Stage, ledger: Ledger, sums: list[tuple[Floats, ...]], guard: _Guard
) -> Record:
    """The layers of a stage, fitted to packed sums over rows, which are taken out of their list."""
    originals = [weights.original(task.consumer.value, prepared.model, prepared.survey) for task in stage.tasks]
    now = [ledger.arrays.get(t.consumer.param, o) for t, o in zip(stage.tasks, originals, strict=True)]
    starts = [
        [_matrix(task, array) for array in ([new] if new is old else [new, old])]
        for task, new, old in zip(stage.tasks, now, originals, strict=True)
    ]
    folds = _unpacked(sums.pop(), stage.tasks[0].features + 1)
    parts: Any = {"affine": stage.tasks[0].affine, "prior": "prior" in recipe.fit, "blend": "blend" in recipe.fit}
    found = refit(folds, starts, judges=guard.judges, margin=guard.margin, **parts)
    after, report = ledger, []
    for task, array, one in zip(stage.tasks, now, found, strict=True):
        after = _written(task, one, array, after)
        report.append(dataclasses.asdict(_entry(task.consumer, one)))
    return of_addition(ledger, after, {"refits": report})


def _stages(tasks: Sequence[_Task]) -> list[_Stage]:
    groups = [tuple(group) for _, group in groupby(tasks, key=lambda t: t.rows)]
    ends = [*(group[0].consumer.position for group in groups[1:]), 0][: len(groups)]
    return [_Stage(group, end) for group, end in zip(groups, ends, strict=True)]


def _tasks(prepared: Prepared, recipe: Recipe, ledger: Ledger) -> list[_Task]:
    """What is to be fitted, in node order."""
    model, survey = prepared.model, prepared.survey
    narrowed = [name for name, marks in survey.marks.items() if any(ledger.dead[m.labels].any() for m in marks)]
    changed = behind(model, narrowed)
    found = [_task(c, prepared, recipe, ledger) for c in consumers(model, survey) if c.source in changed]
    return [t for t in found if t.features <= FEATURES and t.features * t.made.sum() <= NUMBERS and _asked(t, recipe)]


def _asked(task: _Task, recipe: Recipe) -> bool:
    """Whether the parts of the fit that were chosen touch this layer."""
    window = task.consumer.window
    small = window is None or math.prod(window.kernel) == 1 or "patch" in recipe.fit
    return small and (not task.kept.all() or "behind" in recipe.fit)


def _task(consumer: Consumer, prepared: Prepared, recipe: Recipe, ledger: Ledger) -> _Task:
    """A layer as the ledger leaves it; a node for a bias is made only where inputs were lost and size is not tight."""
    tight = recipe.target_params is not None or recipe.target_size is not None
    shape = prepared.survey.facts.shapes[consumer.value]
    kept, made = (
        ~ledger.dead[consumer.units.get(axis, np.zeros(shape[axis], dtype=np.int64))]
        for axis in (consumer.inward, consumer.outward)
    )
    bound = consumer.value in prepared.survey.facts.stored  # the bias of a quantised weight is tied to its scales
    room = consumer.room == "bias" or (not tight and (consumer.room == "slot" or not kept.all()))
    return _Task(consumer=consumer, kept=kept, made=made, affine=room and not bound and "affine" in recipe.fit)


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
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

    def follow(self, stage: _Stage, ledger: Ledger) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
        """What a stage is fitted to and what it reads, batch by batch.

        The dense stream moves on to the next stage, the narrowed one to this.
        """
        goals = self.dense.follow([t.goal for t in stage.tasks], self.untouched, stage.end)
        read = [stage.first.source, *(t.consumer.residual for t in stage.tasks if t.consumer.residual)]
        found = self.narrow.follow(list(dict.fromkeys(read)), ledger, stage.first.position)
        return zip(goals, found, strict=True)

    def walk_past(self, stage: _Stage, ledger: Ledger) -> None:
        """Bring both streams behind a stage that is known: in the very steps that would have measured it."""
        for _ in self.follow(stage, ledger):
            pass

    def sums(self, stage: _Stage, ledger: Ledger, parts: int) -> tuple[Floats, ...]:
        """Packed sums of the rows for the outputs of all layers, side by side; nothing but in the first process."""
        shard = self.dense.shard
        tally = Tally(shard)
        wanted = max(ROWS, 16 * stage.tasks[0].features) // shard.total + 1
        found = zip(shard.numbers, self.dense.masks, self.follow(stage, ledger), strict=True)
        for number, mask, (goal, slim) in found:
            rng = np.random.default_rng((self.seed, stage.first.position, number))
            whole = goal[stage.tasks[0].goal]
            where = _real(rows.positions(whole.shape, stage.first.made, wanted, rng), whole, mask)
            z = rows.inputs(slim[stage.first.source], stage.first, whole.shape, where).astype(np.float32)
            t = np.concatenate([_target(task, goal, slim, where) for task in stage.tasks], axis=1).astype(np.float32)
            fold = _fold(where, whole, stage.first.made, int(self.starts[number]))
            tally.add(number, _packed(z, t, np.maximum(fold - (FOLDS - parts), 0), parts))
        return tally.total()


def _starts(prepared: Prepared, stream: Stream, untouched: Ledger, once: Once) -> Ints:
    """The number of the first sample of every batch, known to all processes; the stream has not moved yet."""
    tally = Tally(stream.shard)
    for number, feed in zip(stream.shard.numbers, stream.record(list(prepared.feed), untouched), strict=True):
        sizes = {a.shape[0] if a.ndim else 1 for a in feed.values()}
        row = np.zeros(stream.shard.total)
        row[number] = sizes.pop() if len(sizes) == 1 else 1
        tally.add(number, [row])
    found = tally.total()
    sizes_of_all = once.shared(lambda: Record(arrays={"sizes": found[0]})).arrays["sizes"]
    return np.cumsum(sizes_of_all).astype(np.int64) - sizes_of_all.astype(np.int64)


def _packed(z: Array, t: Array, part: Ints, parts: int) -> Iterator[Floats]:
    """Sums over the rows of every part, one after the other: they are large."""
    for number in range(parts):
        some = moments(z[part == number], t[part == number])
        yield from (packed(some.gram), some.cross, some.energy, np.array([some.count], np.float64))


def _unpacked(arrays: Sequence[Floats], width: int) -> list[Moments]:
    left = iter(arrays)
    return [
        Moments(unpacked(gram, width), cross, energy, int(count[0]))
        for gram, cross, energy, count in zip(left, left, left, left, strict=True)
    ]


def _real(where: Ints, target: Array, mask: Bools | None) -> Ints:
    """Positions that are not padding."""
    if mask is None or target.shape[:-1] not in (mask.shape, (mask.size,)):
        return where
    return where[np.asarray(mask).ravel()[where]]


def _target(task: _Task, goals: Mapping[str, Array], slim: Mapping[str, Array], where: Ints) -> Array:
    """What the dense network has, less the residual and the bias that are there already."""
    consumer = task.consumer
    target = rows.outputs(goals[task.goal], consumer.made, where)[:, task.made] - consumer.bias[task.made]
    if consumer.residual:
        target = target - rows.outputs(slim[consumer.residual], consumer.made, where)
    return target


def _fold(where: Ints, target: Array, made: int, first: int) -> Ints:
    """Which fold every row is in: samples go round, or rows of an only sample."""
    samples = target.shape[0] if made else 1
    each = max(1, target.size // target.shape[made] // samples)
    sample = where // each + first
    return (sample if samples > 1 or first else where) % FOLDS


def _matrix(task: _Task, array: Array) -> Floats:
    """What stays of a weight of full size, as (features, outputs)."""
    front = np.moveaxis(array, (task.consumer.inward, task.consumer.outward), (0, 1))[task.kept][:, task.made]
    return np.moveaxis(front, 1, -1).reshape(task.features, -1).astype(np.float64)


def _written(task: _Task, found: Fitted, now: Array, ledger: Ledger) -> Ledger:
    """The ledger with the fitted numbers at the kept positions."""
    if found.alpha is None or np.abs(found.weights).max(initial=0.0) > MATERIAL * slots.largest(now.dtype):
        return ledger  # nothing to win, or nothing that the format can hold
    consumer = task.consumer
    array = np.array(now)
    front = np.moveaxis(array, (consumer.inward, consumer.outward), (0, 1))
    shape = (int(task.kept.sum()), *front.shape[2:], int(task.made.sum()))
    limit = slots.largest(array.dtype)
    values = np.moveaxis(np.clip(found.weights, -limit, limit).reshape(shape), -1, 1)
    front[np.ix_(task.kept, task.made)] = values.astype(array.dtype)
    shift = np.zeros(len(task.made))
    shift[task.made] = found.shift
    shifts = {**ledger.shifts, consumer.node: shift} if found.shift.any() else ledger.shifts
    return dataclasses.replace(ledger, arrays={**ledger.arrays, consumer.param: array}, shifts=shifts)


def _entry(consumer: Consumer, found: Fitted) -> Refit:
    return Refit(
        node=consumer.node,
        weight=consumer.value,
        alpha=found.alpha,
        blend=found.blend,
        before=found.before,
        after=found.after,
    )
