"""The second half of `--compensate best`: with all widths decided, every consumer is fitted to the dense network.

Two streams walk the network side by side, the dense one and the narrowed one.  Consumers are fitted in the order of the
network, each behind the ones already fitted, to what the dense network has there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat

import numpy as np

from onnxgrail.algebra.refit import Fitted, Moments, moments, refit, zero_moments
from onnxgrail.budget import cache_bytes
from onnxgrail.calibration import rows
from onnxgrail.calibration.stream import Stream
from onnxgrail.core import Array, Block, Bools, Floats, Ints, Recipe
from onnxgrail.graph import weights
from onnxgrail.graph.consumers import Consumer, consumers
from onnxgrail.graph.survey import Ledger
from onnxgrail.preparation import Prepared

FOLDS = 4  # every fourth sample is held out
FEATURES = 4608  # a consumer with more regressors keeps the weights it has
ROWS = 16384  # rows looked at where that is more than eight per regressor


@dataclass(frozen=True, kw_only=True, slots=True)
class Refit:
    """One fitted consumer, for the report: errors are shares of the target's energy on held-out rows."""

    node: str
    weight: str
    alpha: float | None
    blend: float
    before: float
    after: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Task:
    """A consumer with what stays of its weight.

    Attributes:
        kept: which inputs stay; made: which outputs.
        features: how many regressors the kept inputs make.
        blocks: whose units its inputs are; start: position of the first node that holds any of them, or the consumer's
            own where the block runs alongside others.
    """

    consumer: Consumer
    kept: Bools
    made: Bools
    features: int
    blocks: tuple[Block, ...]
    start: int


def sweep(prepared: Prepared, recipe: Recipe, ledger: Ledger) -> tuple[Ledger, tuple[Refit, ...], float]:
    """Fit every consumer that lost inputs.

    Returns:
        The ledger with fitted weights and shifted biases, one entry per fitted consumer, seconds in ONNX Runtime.
    """
    model, survey = prepared.model, prepared.survey
    todo = [t for c in consumers(model, survey) if (t := _task(c, prepared, ledger)) is not None]
    untouched = weights.empty(survey)
    report: list[Refit] = []
    common = {"providers": recipe.providers, "folder": prepared.folder, "budget": cache_bytes(recipe) // 2}
    with (
        Stream(model, survey, prepared.batches, **common) as dense,  # type: ignore[arg-type]
        Stream(model, survey, prepared.batches, **common) as narrow,  # type: ignore[arg-type]
    ):
        for _, group in groupby(todo, key=lambda t: t.consumer.source):
            tasks = [_reachable(t, narrow.position) for t in group]
            limit = min(t.start for t in tasks)
            dense.advance(untouched, limit)
            narrow.advance(ledger, limit)
            for task, (fit, held) in zip(
                tasks, _measured(tasks, dense, narrow, untouched, ledger, recipe), strict=True
            ):
                dense_weight = weights.original(task.consumer.value, model, survey)
                now = ledger.arrays.get(task.consumer.param, dense_weight)
                starts = [_matrix(task, array) for array in (now, dense_weight)]
                found = refit(fit, held, starts, affine=_may_shift(task.consumer, prepared))
                ledger = _written(task, found, now, ledger)
                report.append(_entry(task.consumer, found))
        return ledger, tuple(report), dense.forward + narrow.forward


def _task(consumer: Consumer, prepared: Prepared, ledger: Ledger) -> _Task | None:
    """What is to be fitted; None where the consumer lost nothing, or has too many regressors."""
    operand = prepared.survey.operands[consumer.node, 1]
    kept = ~ledger.dead[operand.units[consumer.inward]]
    shape = prepared.survey.facts.shapes[consumer.value]
    outward = operand.units.get(consumer.outward)
    made = np.ones(shape[consumer.outward], dtype=bool) if outward is None else ~ledger.dead[outward]
    taps = math.prod(consumer.window.kernel) if consumer.window is not None else 1
    features = int(kept.sum()) * taps
    if kept.all() or features > FEATURES:
        return None
    blocks = tuple(b for b in prepared.survey.blocks if np.isin(b.ids, operand.units[consumer.inward]).any())
    inner = all(b.kind != "stream" for b in blocks)
    start = min(b.span[0] for b in blocks) if inner else consumer.position
    return _Task(consumer=consumer, kept=kept, made=made, features=features, blocks=blocks, start=start)


def _reachable(task: _Task, position: int) -> _Task:
    """The task, measured from its own consumer on where its blocks begin behind what the stream has left."""
    return task if task.start >= position else dataclasses.replace(task, start=task.consumer.position)


def _measured(
    tasks: Sequence[_Task], dense: Stream, narrow: Stream, untouched: Ledger, ledger: Ledger, recipe: Recipe
) -> list[tuple[Moments, Moments]]:
    """Sums over fitted and over held-out rows, per task."""
    read = np.concatenate([b.ids for t in tasks for b in t.blocks])
    near = all(t.start < t.consumer.position for t in tasks) and not narrow.has_lost(read)
    sums = [(zero_moments(t.features, int(t.made.sum()), near=near),) * 2 for t in tasks]
    rng = np.random.default_rng(recipe.seed)
    targets = dense.record([t.consumer.total or t.consumer.output for t in tasks], untouched)
    found = narrow.record([n for t in tasks for n in (t.consumer.source, t.consumer.residual) if n], ledger)
    whole = narrow.record([t.consumer.output for t in tasks], _whole(tasks, ledger)) if near else repeat({})
    first = 0
    for mask, goals, slim, wide in zip(dense.masks, targets, found, whole, strict=False):
        for number, task in enumerate(tasks):
            goal = goals[task.consumer.total or task.consumer.output]
            wanted = max(ROWS, 8 * task.features) // len(dense.masks) + 1
            where = _real(rows.positions(goal.shape, task.consumer.made, wanted, rng), goal, mask)
            batch = _Rows(*_targets(task, goal, slim, wide, where))
            held = _held_out(where, goal, task.consumer.made, first)
            fit, apart = sums[number]
            sums[number] = fit + batch.moments(~held), apart + batch.moments(held)
        first += len(next(iter(goals.values())))
    return sums


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Regressors, far and near targets of one batch."""

    z: Array
    far: Array
    near: Array | None

    def moments(self, chosen: Bools) -> Moments:
        """Sums over some of the rows."""
        return moments(self.z[chosen], self.far[chosen], None if self.near is None else self.near[chosen])


def _whole(tasks: Sequence[_Task], ledger: Ledger) -> Ledger:
    """The ledger as if the blocks that these consumers read had not been narrowed."""
    dead = ledger.dead.copy()
    for block in (b for t in tasks for b in t.blocks):
        dead[block.ids] = False
    read = {t.consumer.param for t in tasks}
    arrays = {name: array for name, array in ledger.arrays.items() if name not in read}
    return dataclasses.replace(ledger, dead=dead, arrays=arrays)


def _real(where: Ints, target: Array, mask: Bools | None) -> Ints:
    """Positions that are not padding."""
    if mask is None or target.shape[:-1] not in (mask.shape, (mask.size,)):
        return where
    return where[np.asarray(mask).ravel()[where]]


def _targets(
    task: _Task, goal: Array, slim: Mapping[str, Array], wide: Mapping[str, Array], where: Ints
) -> tuple[Array, Array, Array | None]:
    """Regressors; what the dense network has less the residual that is there already; what the full layer makes."""
    consumer = task.consumer
    z = rows.inputs(slim[consumer.source], consumer, goal.shape, where).astype(np.float32)
    far = rows.outputs(goal, consumer.made, where)[:, task.made] - consumer.bias[task.made]
    if consumer.residual:
        far = far - rows.outputs(slim[consumer.residual], consumer.made, where)
    if consumer.output not in wide:
        return z, far.astype(np.float32), None
    inside = consumer.bias[task.made] if consumer.inner else 0.0
    near = rows.outputs(wide[consumer.output], consumer.made, where) - inside
    return z, far.astype(np.float32), near.astype(np.float32)


def _held_out(where: Ints, target: Array, made: int, first: int) -> Bools:
    """Rows of every fourth sample, or every fourth row of an only sample."""
    samples = target.shape[0] if made else 1
    each = max(1, target.size // target.shape[made] // samples)
    sample = where // each + first
    return np.asarray((sample if samples > 1 or first else where) % FOLDS == FOLDS - 1)


def _matrix(task: _Task, array: Array) -> Floats:
    """What stays of a weight of full size, as (features, outputs)."""
    front = np.moveaxis(array, (task.consumer.inward, task.consumer.outward), (0, 1))[task.kept][:, task.made]
    return np.moveaxis(front, 1, -1).reshape(task.features, -1).astype(np.float64)


def _may_shift(consumer: Consumer, prepared: Prepared) -> bool:
    """Whether the bias may move; that of a quantised weight is bound to its scales."""
    return consumer.value not in prepared.survey.facts.stored


def _written(task: _Task, found: Fitted, now: Array, ledger: Ledger) -> Ledger:
    """The ledger with the fitted numbers at the kept positions."""
    if found.alpha is None:
        return ledger
    consumer = task.consumer
    array = np.array(now)
    front = np.moveaxis(array, (consumer.inward, consumer.outward), (0, 1))
    shape = (int(task.kept.sum()), *front.shape[2:], int(task.made.sum()))
    limit = float(np.finfo(array.dtype).max) if array.dtype.kind == "f" else np.inf
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
