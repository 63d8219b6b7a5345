"""Implements `--compensate best`: blocks are decided on the dense network, and every changed layer is fitted to it.

Two streams walk the dense and the narrowed network side by side. The same runs of the dense network give the statistics
for the decisions and the targets for the fits. Matrices and convolutions are fitted in network order, each after all
upstream fits: layers that lost inputs, and layers that kept all inputs but whose inputs changed.

A fit starts from GRAIL's weights if a consumer of the block cannot be fitted, or if there are many samples, many rows
per feature, and the selection of units needs second moments anyway; not if all that reads a stream takes more memory
than a fit may, since GRAIL computes it at once. Otherwise it starts from the kept weights, for two
reasons: the second moments of wide blocks cost as much as a forward pass; and with few rows the held-out error would
favor GRAIL's weights, which were computed from all rows, including the held-out ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onnxgrail.algebra.fit.choice import Fitted, Rules
from onnxgrail.algebra.fit.formats import fit_in_range
from onnxgrail.algebra.fit.refit import refit
from onnxgrail.calibration.stream.cache import Beginning
from onnxgrail.calibration.stream.dense import by_block
from onnxgrail.core import Array, Block, BlockError, Change, Floats, Outcome, Stats
from onnxgrail.graph import slots
from onnxgrail.graph.fittable.consumers import Consumer
from onnxgrail.graph.io.mapped import in_files
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.amounts import fit_bytes
from onnxgrail.machine.memory import Pile
from onnxgrail.machine.steps.codec import RECORD, Record
from onnxgrail.narrowing.bits.again import again
from onnxgrail.narrowing.choosing import Place, Run, room, scarce
from onnxgrail.narrowing.forecast.ticks import for_turns
from onnxgrail.narrowing.layers import (
    Refit,
    Stage,
    Task,
    as_decided,
    filled,
    matrix_of,
    of_addition,
    stages_at,
    with_addition,
)
from onnxgrail.narrowing.order import Turn, jointly, owners_of, turns
from onnxgrail.narrowing.two_networks import Pair, moments, opened

FEW = 64  # samples below which blocks are only narrowed: with 16, a ViT then loses .58 to .71 times as much
WORSE = "no fit lowers the error on held-out samples"


def sweep(run: Run, blocks: Sequence[Block], beginning: Beginning | None = None) -> float:
    """Decide every block on the dense network, and fit every matrix and convolution whose input changed.

    All processes sum over rows, and share large solutions. Cached results are not measured again; both streams catch up
    when they are needed.

    Args:
        run: the decisions so far; it receives decisions, fitted weights and one entry per layer.
        blocks: the blocks to narrow.
        beginning: a cut before all of them, where activations are known; None for the feeds.

    Returns:
        Seconds spent inside ONNX Runtime.
    """
    prepared, recipe = run.prepared, run.recipe
    if not blocks:
        return 0.0
    stages = stages_at(prepared, recipe, {b.name: run.kept[b.name] for b in blocks})
    pile = Pile(heavy=bool(in_files(prepared.model)))
    with opened(prepared, run.job, beginning, run.targets) as pair:
        walk = _Walk(run, pair, turns(blocks, stages))
        for turn in walk.turns:
            walk.take(turn)
            pile.add(sum(room(block, prepared) for block in turn.blocks))
        run.changes = [_validated(change, run) for change in run.changes]
        return pair.dense.forward + pair.narrow.forward


class _Walk:
    """A walk over the turns; both streams move when a turn has to be measured."""

    def __init__(self, run: Run, pair: Pair, todo: Sequence[Turn[Stage]]) -> None:
        self.turns = todo
        self._run, self._pair = run, pair
        self._limit = fit_bytes(run.recipe)
        params = {t.consumer.param for turn in todo for s in turn.layers if self._fits(s) for t in s.tasks}
        blocks = [b for t in todo for b in t.blocks]
        whole = [b for b in blocks if {s.param for s in b.consumers} <= params]
        few = run.prepared.batches.samples < FEW
        large = {b.name for b in blocks if b.ranked and room(b, run.prepared) > self._limit}  # all that read a stream
        later = {b.name for b in whole if few or not run.needs_gram(b) or scarce(b, run.prepared)}
        run.fitted = frozenset(later | large)
        fitted = [replace(turn, layers=tuple(filter(self._fits, turn.layers))) for turn in todo]
        self._tick = run.tick = for_turns(run, fitted, pair)

    def take(self, turn: Turn[Stage]) -> None:
        """Decide the blocks of a turn, then fit its layers."""
        if turn.blocks:
            self._settle(turn)
        ends = [*(stage.span[0] for stage in turn.layers[1:]), turn.limit]
        for stage, end in zip(turn.layers, ends, strict=False):
            if self._fits(stage):
                self._fit(stage, end)
            else:
                self._run.refits += _left(stage)
        self._pair.dense.let_go()

    def _fits(self, stage: Stage) -> bool:
        return stage.memory <= self._limit

    def _settle(self, turn: Turn[Stage]) -> None:
        """Decide blocks on the dense network; the same runs keep the targets of the layers to fit."""
        run, pair = self._run, self._pair
        known = [run.known(b) for b in turn.blocks]
        wanted = [run.probes(b) for b in turn.blocks]
        probes = [p for some in wanted for p in some]
        goals = [name for stage in turn.layers if self._fits(stage) for name in stage.goals]
        # a fold is measured from the cut upstream of the block
        end, targets = (None, None) if run.folds(turn.blocks) else (turn.limit, goals)
        measured: Sequence[tuple[Stats, ...]] = [()] * len(turn.blocks)
        deal = run.deal(turn.blocks, known, there=run.dense is not None)
        if all(known):
            pair.dense.skip(probes, pair.untouched, self._tick, end, targets)
        elif run.dense is None:
            owners = [deal.of(block) for block, some in zip(turn.blocks, wanted, strict=True) for _ in some]
            measured = by_block(wanted, pair.dense.measure(probes, pair.untouched, self._tick, end, targets, owners))
        else:
            pair.dense.skip(probes, pair.untouched, self._tick, end, targets)
            measured = [run.dense[b.name] for b in turn.blocks]
        run.take(turn.blocks, known, measured, Place(deal=deal, stream=pair.dense, before=pair.untouched))

    def _fit(self, stage: Stage, end: int) -> None:
        """Fit the layers of a stage, given all upstream decisions and fits."""
        run, ledger = self._run, self._run.ledger
        stage = as_decided(stage, run.prepared, run.recipe, ledger)
        sums: list[tuple[Floats, ...]] = []  # `_fitted` frees the list
        owners = owners_of(stage.products, run.job.group)
        if run.job.steps.finished([stage.key]):
            self._pair.skip(stage, ledger, end, self._tick)
        else:
            sums.append(self._pair.sums(stage, ledger, end, self._tick, owners))

        def fitted() -> Record:
            with jointly(run.job.group, owners):
                return _fitted(run, stage, sums)

        found = run.job.steps.once(stage.key, fitted, RECORD, owners)
        self._tick()
        run.ledger = with_addition(ledger, found, run.prepared.model)
        run.refits += tuple(Refit(**row) for row in found.notes["refits"])


def _left(stage: Stage) -> tuple[Refit, ...]:
    """Return the entries of layers that are not fitted because their sums need too much memory."""
    why = f"fitting would take {stage.memory / 2**30:.1f} GiB; a larger --cache-budget allows it"
    common: dict[str, Any] = {"alpha": None, "blend": 0.0, "before": None, "after": None, "reason": why}
    return tuple(Refit(node=task.consumer.node, weight=task.consumer.value, **common) for task in stage.tasks)


def _fitted(run: Run, stage: Stage, sums: list[tuple[Floats, ...]]) -> Record:
    """Fit the layers of a stage to packed sums over rows, which are popped from their list to free memory."""
    prepared, recipe, ledger = run.prepared, run.recipe, run.ledger
    originals = [weights.original(task.consumer.value, prepared.model, prepared.survey) for task in stage.tasks]
    now = [ledger.arrays.get(t.consumer.param, o) for t, o in zip(stage.tasks, originals, strict=True)]
    starts = [
        [matrix_of(task, array) for array in ([new] if new is old else [new, old])]
        for task, new, old in zip(stage.tasks, now, originals, strict=True)
    ]
    folds = moments(sums.pop(), stage, _side_by_side(stage, originals) if stage.through else None)
    rules = Rules(affine=stage.tasks[0].affine, prior="prior" in recipe.fit, blend="blend" in recipe.fit)
    found = refit(folds, starts, rules)
    after, report, first = ledger, [], 0
    for task, array, one in zip(stage.tasks, now, found, strict=True):
        fit, clamped, why = fit_in_range(one, slots.largest(array.dtype))
        written, mine = _written(task, fit, array, after), slice(first, first := first + task.outputs)
        if fit.alpha is not None:
            written, lost = again(prepared, task, [fold.outputs(mine) for fold in folds], written, after, array)
            fit, why = (replace(fit, alpha=None, blend=0.0, after=fit.before), lost) if lost else (fit, why)
        after = written
        report.append(dataclasses.asdict(_entry(task.consumer, fit, clamped, why)))
    return of_addition(ledger, after, {"refits": report})


def _side_by_side(stage: Stage, originals: Sequence[Array]) -> Array:
    """Return the original weights (inputs, outputs) of all layers of a stage in float32, side by side."""
    whole = (replace(task, kept=np.ones_like(task.kept)) for task in stage.tasks)
    matrices = [matrix_of(*pair) for pair in zip(whole, originals, strict=True)]
    return np.concatenate(matrices, axis=1, dtype=np.float32, casting="same_kind")


def _written(task: Task, found: Fitted, now: Array, ledger: Ledger) -> Ledger:
    """Return the ledger with the fitted weights and biases at the kept positions."""
    if found.alpha is None:
        return ledger
    consumer = task.consumer
    shift = np.zeros(len(task.made))
    shift[task.made] = found.shift
    shifts = {**ledger.shifts, consumer.node: shift} if found.shift.any() else ledger.shifts
    arrays = {**ledger.arrays, consumer.param: filled(task, found.weights, now)}
    return dataclasses.replace(ledger, arrays=arrays, shifts=shifts)


def _entry(consumer: Consumer, found: Fitted, clamped: int, why: str) -> Refit:
    return Refit(
        node=consumer.node,
        weight=consumer.value,
        alpha=found.alpha,
        blend=found.blend,
        before=found.before,
        after=found.after,
        clamped=clamped,
        reason=why,
    )


def _validated(change: Change, run: Run) -> Change:
    """Return the change with the mean held-out error of the layers that read the block's units.

    If all of these layers are fitted, the change has no other error, and takes its outcome from the fits.
    """
    mine = {slot.initializer for slot in change.block.consumers}
    fits = [r for r in run.refits if r.weight in mine and r.after is not None]
    if not fits:
        return change
    before, after = (float(np.mean([getattr(r, name) for r in fits])) for name in ("before", "after"))
    if change.block.name not in run.fitted:
        return replace(change, error=replace(change.error, validation=after))
    change = replace(change, error=BlockError(plain=before, compensated=after, validation=after))
    if all(r.alpha is None for r in fits):
        why = next((r.reason for r in fits if r.reason), WORSE)
        return replace(change, outcome=Outcome(status="plain", reason=why))
    clamped = change.outcome.clamped + sum(r.clamped for r in fits)
    return replace(change, outcome=replace(change.outcome, clamped=clamped))
