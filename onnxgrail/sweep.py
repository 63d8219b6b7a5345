"""The second half of `--compensate best`: with all widths decided, every layer is fitted to the dense network.

Two streams walk the network side by side, the dense one and the narrowed one.  Matrices and convolutions are fitted in
the order of the network, each behind the ones already fitted, to what the dense network has there: those that lost
inputs, and those that kept them all but read what is no longer as it was.
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail import slots
from onnxgrail.additions import of_addition, with_addition
from onnxgrail.algebra.formats import MATERIAL
from onnxgrail.algebra.refit import MARGIN, Fitted, refit
from onnxgrail.budget import cache_bytes
from onnxgrail.core import Array, Floats, Recipe
from onnxgrail.graph import weights
from onnxgrail.graph.consumers import Consumer
from onnxgrail.graph.survey import Ledger
from onnxgrail.layers import Stage, Task, matrix_of, stages_of, tasks_of
from onnxgrail.once import Once
from onnxgrail.pair import FOLDS, Pair, moments, starts_of
from onnxgrail.preparation import Prepared, stream_of
from onnxgrail.record import Record

FEW = 64  # with fewer samples than that the folds are held out in turn, and every one of them must gain
MEMORY = 3 * 2**29  # bytes that a fit may take; a larger --cache-budget raises them by half as much again
SURE = 0.1  # share of the held-out error that a choice must win then


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
    """One fitted layer, for the report: errors are shares of the target's energy on held-out rows.

    A layer that was not looked at has none, but a reason.
    """

    node: str
    weight: str
    alpha: float | None
    blend: float
    before: float | None
    after: float | None
    reason: str = ""


def sweep(prepared: Prepared, recipe: Recipe, ledger: Ledger, once: Once) -> tuple[Ledger, tuple[Refit, ...], float]:
    """Fit every matrix and convolution that lost inputs, or that reads what has changed.

    All processes add up rows, the first one fits.  Where fits are known already nothing is measured, and both streams
    follow when they are needed again.

    Returns:
        The ledger with fitted weights and shifted biases, one entry per layer, seconds in ONNX Runtime.
    """
    stages = stages_of(tasks_of(prepared, recipe, ledger))
    if not stages:
        return ledger, (), 0.0
    guard = EVERY if prepared.batches.samples < FEW else LAST
    report: list[Refit] = []
    known: list[tuple[Stage, Ledger]] = []
    with ExitStack() as stack:
        opened = (stream_of(prepared, recipe, once.group, share=2) for _ in range(2))
        dense, narrow = (stack.enter_context(stream) for stream in opened)
        untouched = weights.empty(prepared.survey)
        pair = Pair(dense, narrow, untouched, starts_of(dense, prepared.feed, untouched, once), recipe.seed)
        limit = max(MEMORY, cache_bytes(recipe) * 3 // 2)
        for stage in stages:
            if stage.memory(guard.parts) > limit:
                report += _left(stage, guard.parts)
                continue
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


def _left(stage: Stage, parts: int) -> list[Refit]:
    """Entries of layers whose sums are too large."""
    why = f"fitting would take {stage.memory(parts) / 2**30:.1f} GiB; a larger --cache-budget allows it"
    common: dict[str, Any] = {"alpha": None, "blend": 0.0, "before": None, "after": None, "reason": why}
    return [Refit(node=task.consumer.node, weight=task.consumer.value, **common) for task in stage.tasks]


def _fitted(
    prepared: Prepared, recipe: Recipe, stage: Stage, ledger: Ledger, sums: list[tuple[Floats, ...]], guard: _Guard
) -> Record:
    """The layers of a stage, fitted to packed sums over rows, which are taken out of their list."""
    originals = [weights.original(task.consumer.value, prepared.model, prepared.survey) for task in stage.tasks]
    now = [ledger.arrays.get(t.consumer.param, o) for t, o in zip(stage.tasks, originals, strict=True)]
    starts = [
        [matrix_of(task, array) for array in ([new] if new is old else [new, old])]
        for task, new, old in zip(stage.tasks, now, originals, strict=True)
    ]
    folds = moments(sums.pop(), stage)
    parts: Any = {"affine": stage.tasks[0].affine, "prior": "prior" in recipe.fit, "blend": "blend" in recipe.fit}
    found = refit(folds, starts, judges=guard.judges, margin=guard.margin, **parts)
    after, report = ledger, []
    for task, array, one in zip(stage.tasks, now, found, strict=True):
        after = _written(task, one, array, after)
        report.append(dataclasses.asdict(_entry(task.consumer, one)))
    return of_addition(ledger, after, {"refits": report})


def _written(task: Task, found: Fitted, now: Array, ledger: Ledger) -> Ledger:
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
