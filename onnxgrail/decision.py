"""From a traced model to decisions: widths, proof, then calibration and compensation block by block."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail import plan
from onnxgrail.algebra.compensate import COMPENSATORS, Compensator
from onnxgrail.algebra.judge import judge
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.selectors import SELECTORS
from onnxgrail.calibration.proof import prove
from onnxgrail.calibration.stream import Stream
from onnxgrail.core import Block, Change, Floats, Progress, Recipe, Refusal, View
from onnxgrail.graph import weights
from onnxgrail.graph.survey import Ledger
from onnxgrail.methods.grail import reduce_and_compensate
from onnxgrail.order import steps
from onnxgrail.preparation import Clock, Prepared


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decision:
    """What is to become of the model.

    Attributes:
        chosen: blocks the recipe selects.
        changes: one per narrowed block, in the order they were decided.
        refusals: blocks that did not pass the proof.
        ledger: all changes together.
    """

    chosen: tuple[Block, ...]
    changes: tuple[Change, ...]
    refusals: tuple[Refusal, ...]
    ledger: Ledger


def decide(prepared: Prepared, recipe: Recipe, clock: Clock, progress: Progress) -> Decision:
    """Choose widths, prove that they narrow exactly, then calibrate and compensate.

    Raises:
        UsageError: a name pattern is not a regular expression.
        DataError, ModelError: activations or weights hold NaN or infinity.
    """
    chosen = plan.selected(prepared.survey.blocks, recipe)
    kept = plan.widths(chosen, recipe)
    blocks = tuple(b for b in chosen if kept[b.name] < b.units)
    refusals: tuple[Refusal, ...] = ()
    with clock.stage("prove"):
        if blocks:
            blocks, refusals = prove(
                prepared.model,
                prepared.survey,
                blocks,
                kept,
                prepared.feed,
                providers=recipe.providers,
                folder=prepared.folder,
            )
    with clock.stage("calibrate"):
        run = _Run(prepared, recipe, kept)
        clock.seconds["forward"] = 0.0
        if _needs_data(recipe):
            clock.seconds["forward"] = _measured(run, blocks, progress)
        else:
            for block in blocks:
                run.settle(run.choose(View(block=block, weights=run.weights(block), stats=())))
    return Decision(chosen=chosen, changes=tuple(run.changes), refusals=refusals, ledger=run.ledger)


class _Run:
    """The decisions so far; lives as long as one call of `decide`."""

    def __init__(self, prepared: Prepared, recipe: Recipe, kept: Mapping[str, int]) -> None:
        self.prepared, self.recipe, self.kept = prepared, recipe, kept
        self.ledger = weights.empty(prepared.survey)
        self.changes: list[Change] = []

    def weights(self, block: Block) -> tuple[Floats, ...]:
        """A block's weights as they are now."""
        return weights.read(block, self.prepared.model, self.prepared.survey, self.ledger)

    def choose(self, view: View) -> Change:
        """Decide one block."""
        return reduce_and_compensate(
            view,
            self.kept[view.block.name],
            selector=SELECTORS[self.recipe.selector],
            reducer=REDUCERS[self.recipe.reducer],
            compensator=_compensator(self.recipe),
            rng=np.random.default_rng((self.recipe.seed, int(view.block.ids[0]))),
        )

    def settle(self, change: Change) -> None:
        """Write a decision into the ledger."""
        self.changes.append(change)
        self.ledger = self.after(change, self.ledger)

    def after(self, change: Change, ledger: Ledger) -> Ledger:
        """A ledger with one more decision."""
        return weights.record(change, self.prepared.model, self.prepared.survey, ledger)


def _measured(run: _Run, blocks: Sequence[Block], progress: Progress) -> float:
    """Settle every block on statistics; in closed loop each sees the network as decided so far.

    Returns:
        Seconds spent inside ONNX Runtime.
    """
    prepared, recipe = run.prepared, run.recipe
    todo = steps(blocks, closed_loop=recipe.closed_loop)
    total, done = len(prepared.batches) * len(todo), 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress("calibrating", done, total)

    with Stream(
        prepared.model, prepared.survey, prepared.batches, providers=recipe.providers, folder=prepared.folder
    ) as stream:
        for step in todo:
            before = run.ledger
            stream.advance(before, step.limit)
            found = iter(stream.measure([p for b in step.blocks for p in b.probes], before, tick))
            measured = [tuple(next(found) for _ in b.probes) for b in step.blocks]
            for block, stats in zip(step.blocks, measured, strict=True):
                view = View(block=block, weights=run.weights(block), stats=stats)
                change = run.choose(view)
                if change.reducer.cluster is not None:  # averaged statistics promise too much
                    joint = stream.measure_fold(block.probes, change.reducer.kept, before, run.after(change, before))
                    change = judge(view, change, joint)
                run.settle(change)
        return stream.forward


def _compensator(recipe: Recipe) -> Compensator:
    """The chosen compensator with the recipe's ridge."""
    chosen: Any = COMPENSATORS[recipe.compensate]
    fields = {f.name for f in dataclasses.fields(chosen)}
    compensator: Compensator = dataclasses.replace(chosen, alpha=recipe.ridge) if "alpha" in fields else chosen
    return compensator


def _needs_data(recipe: Recipe) -> bool:
    reducer = REDUCERS[recipe.reducer]
    selecting = reducer.needs_scores and SELECTORS[recipe.selector].needs_data
    return selecting or reducer.needs_data or COMPENSATORS[recipe.compensate].needs_data
