"""The second half of `--compensate best`: with all widths decided, every layer is fitted to the dense network.

Two streams walk the network side by side, the dense one and the narrowed one.  Matrices and convolutions are fitted in
the order of the network, each behind the ones already fitted, to what the dense network has there: those that lost
inputs, and those that kept them all but read what is no longer as it was.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail import slots
from onnxgrail.algebra.formats import MATERIAL
from onnxgrail.algebra.refit import Fitted, Moments, moments, refit, zero_moments
from onnxgrail.calibration import rows
from onnxgrail.calibration.stream import Stream
from onnxgrail.core import Array, Bools, Floats, Ints, Recipe
from onnxgrail.graph import weights
from onnxgrail.graph.consumers import Consumer, behind, consumers
from onnxgrail.graph.survey import Ledger
from onnxgrail.preparation import Prepared, stream_of

FOLDS = 4  # of the samples; the last one is held out
FEW = 64  # with fewer samples than that the folds are held out in turn, and every one of them must gain
SURE = 0.02  # share of the held-out error that a choice must win then
FEATURES = 8192  # a layer with more regressors keeps the weights it has
NUMBERS = 1 << 26  # and so does one with more weights
ROWS = 65536  # rows looked at where that is more than sixteen per regressor


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


def sweep(prepared: Prepared, recipe: Recipe, ledger: Ledger) -> tuple[Ledger, tuple[Refit, ...], float]:
    """Fit every matrix and convolution that lost inputs, or that reads what has changed.

    Returns:
        The ledger with fitted weights and shifted biases, one entry per layer, seconds in ONNX Runtime.
    """
    model, survey = prepared.model, prepared.survey
    groups = [list(group) for _, group in groupby(_tasks(prepared, recipe, ledger), key=lambda t: t.rows)]
    ends = [*(group[0].consumer.position for group in groups[1:]), 0][: len(groups)]
    few = prepared.batches.samples < FEW
    guard: Any = {"judges": FOLDS, "margin": SURE} if few else {}
    report: list[Refit] = []
    with stream_of(prepared, recipe, share=2) as dense, stream_of(prepared, recipe, share=2) as narrow:
        for tasks, end in zip(groups, ends, strict=True):
            folds = _measured(tasks, end, dense, narrow, weights.empty(survey), ledger, recipe.seed)
            originals = [weights.original(task.consumer.value, model, survey) for task in tasks]
            now = [ledger.arrays.get(t.consumer.param, o) for t, o in zip(tasks, originals, strict=True)]
            starts = [
                [_matrix(task, array) for array in ([new] if new is old else [new, old])]
                for task, new, old in zip(tasks, now, originals, strict=True)
            ]
            found = refit(folds, starts, affine=tasks[0].affine, **guard)
            for task, array, one in zip(tasks, now, found, strict=True):
                ledger = _written(task, one, array, ledger, model)
                report.append(_entry(task.consumer, one))
        return ledger, tuple(report), dense.forward + narrow.forward


def _tasks(prepared: Prepared, recipe: Recipe, ledger: Ledger) -> list[_Task]:
    """What is to be fitted, in node order."""
    model, survey = prepared.model, prepared.survey
    narrowed = [name for name, marks in survey.marks.items() if any(ledger.dead[m.labels].any() for m in marks)]
    changed = behind(model, narrowed)
    tight = recipe.target_params is not None or recipe.target_size is not None
    found = [_task(c, prepared, ledger, tight=tight) for c in consumers(model, survey) if c.source in changed]
    return [t for t in found if t.features <= FEATURES and t.features * t.made.sum() <= NUMBERS]


def _task(consumer: Consumer, prepared: Prepared, ledger: Ledger, *, tight: bool) -> _Task:
    """A layer as the ledger leaves it; a node for a bias is made only where inputs were lost and size is not tight."""
    shape = prepared.survey.facts.shapes[consumer.value]
    kept, made = (
        ~ledger.dead[consumer.units.get(axis, np.zeros(shape[axis], dtype=np.int64))]
        for axis in (consumer.inward, consumer.outward)
    )
    bound = consumer.value in prepared.survey.facts.stored  # the bias of a quantised weight is tied to its scales
    room = consumer.room == "bias" or (not tight and (consumer.room == "slot" or not kept.all()))
    return _Task(consumer=consumer, kept=kept, made=made, affine=room and not bound)


def _measured(
    tasks: Sequence[_Task], end: int, dense: Stream, narrow: Stream, untouched: Ledger, ledger: Ledger, seed: int
) -> list[Moments]:
    """Sums per fold of the rows for the outputs of layers that read one tensor, side by side.

    The dense stream moves on up to node `end`, where the next layers are, the narrowed one to where these are.
    """
    first = tasks[0].consumer
    folds = [zero_moments(tasks[0].features, sum(int(t.made.sum()) for t in tasks))] * FOLDS
    goals = dense.follow([t.goal for t in tasks], untouched, end)
    read = [first.source, *(t.consumer.residual for t in tasks if t.consumer.residual)]
    found = narrow.follow(list(dict.fromkeys(read)), ledger, first.position)
    wanted = max(ROWS, 16 * tasks[0].features) // len(dense.masks) + 1
    samples = 0
    for number, (mask, goal, slim) in enumerate(zip(dense.masks, goals, found, strict=True)):
        whole = goal[tasks[0].goal]
        where = rows.positions(whole.shape, first.made, wanted, np.random.default_rng((seed, first.position, number)))
        where = _real(where, whole, mask)
        z = rows.inputs(slim[first.source], first, whole.shape, where).astype(np.float32)
        t = np.concatenate([_target(task, goal, slim, where) for task in tasks], axis=1).astype(np.float32)
        fold = _fold(where, whole, first.made, samples)
        for some in np.unique(fold):
            folds[some] += moments(z[fold == some], t[fold == some])
        samples += len(whole)
    return folds


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


def _written(task: _Task, found: Fitted, now: Array, ledger: Ledger, model: ir.Model) -> Ledger:
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
    stored = weights.put(array, model.graph.initializers.get(consumer.value))
    return dataclasses.replace(ledger, arrays={**ledger.arrays, consumer.param: stored}, shifts=shifts)


def _entry(consumer: Consumer, found: Fitted) -> Refit:
    return Refit(
        node=consumer.node,
        weight=consumer.value,
        alpha=found.alpha,
        blend=found.blend,
        before=found.before,
        after=found.after,
    )
