"""Blocks are settled one by one: measured behind what is decided already, decided, written into the ledger."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrail import norms, slots
from onnxgrail.algebra.compensate import BEST, COMPENSATORS, Compensator
from onnxgrail.algebra.formats import in_range
from onnxgrail.algebra.judge import judge
from onnxgrail.algebra.method import reduce_and_compensate
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.selectors import SELECTORS
from onnxgrail.calibration.dense import Dense, by_block
from onnxgrail.calibration.stream import Stream
from onnxgrail.core import Block, Change, Floats, Probe, Progress, Recipe, Selector, Stats, View
from onnxgrail.graph import weights
from onnxgrail.graph.mapped import in_files
from onnxgrail.graph.survey import Ledger
from onnxgrail.memory import give_back
from onnxgrail.norms import Norm
from onnxgrail.once import Once
from onnxgrail.order import Step, steps
from onnxgrail.parallel import shard_of
from onnxgrail.preparation import Prepared, stream_of
from onnxgrail.record import Record, change_of, of_change
from onnxgrail.sweep import Refit, sweep

Fold = Callable[[Change], tuple[Stats, ...]]
"""What a fold makes of a block's activations."""

PILE = 2**28  # bytes of arrays that may have come and gone before memory is given back; that takes a while


class Run:
    """The decisions so far; lives as long as one call of `decide`."""

    def __init__(
        self, prepared: Prepared, recipe: Recipe, kept: Mapping[str, int], once: Once, dense: Dense | None = None
    ) -> None:
        self.prepared, self.recipe, self.kept, self.once, self.dense = prepared, recipe, kept, once, dense
        self.ledger = weights.empty(prepared.survey)
        self.changes: list[Change] = []
        self.refits: tuple[Refit, ...] = ()
        self.norms: tuple[Norm, ...] = ()

    def weights(self, block: Block) -> tuple[Floats, ...]:
        """A block's weights as they are now."""
        return weights.read(block, self.prepared.model, self.prepared.survey, self.ledger)

    def known(self, block: Block) -> Change | None:
        """What a run that went before decided about a block."""
        found = self.once.known(key(block))
        return None if found is None else change_of(found, block)

    def choose(self, block: Block, stats: tuple[Stats, ...], fold: Fold | None = None) -> Change:
        """Decide one block; with `fold`, an average over clusters is judged on the activations it really gives."""
        once, scores = self.once, SELECTORS[self.recipe.selector]
        slopes = self.prepared.gradients.get(block.name)
        view = functools.cache(lambda: View(block=block, weights=self.weights(block), stats=stats, gradient=slopes))

        def first() -> Record:
            change = decided(view(), self.kept[block.name], self.recipe, scores)
            judged = fold is not None and change.reducer.cluster is not None
            return of_change(change if judged else self.fitting(view(), change))

        found = once.shared(first)
        change = change_of(found, block)
        if fold is not None and change.reducer.cluster is not None:  # averaged statistics promise too much
            joint = fold(change)
            found = once.shared(lambda: of_change(self.fitting(view(), judge(view(), change, joint))))
        once.keep(key(block), found)
        return change_of(found, block)

    def fitting(self, view: View, change: Change) -> Change:
        """A decision that the formats of the weights can hold."""
        facts = self.prepared.survey.facts
        names = [slot.initializer for slot in view.block.slots]
        limits = [np.inf if n in facts.stored else slots.largest(facts.dtypes[n]) for n in names]
        return in_range(view, change, limits)

    def settle(self, change: Change) -> None:
        """Write a decision into the ledger, which then has its numbers: of all blocks they would fill the memory."""
        self.ledger = self.after(change, self.ledger)
        self.changes.append(dataclasses.replace(change, weights=()))

    def after(self, change: Change, ledger: Ledger) -> Ledger:
        """A ledger with one more decision."""
        return weights.record(change, self.prepared.model, self.prepared.survey, ledger)


def decided(view: View, kept: int, recipe: Recipe, selector: Selector) -> Change:
    """One block at one width."""
    return reduce_and_compensate(
        view,
        kept,
        selector=selector,
        reducer=REDUCERS[recipe.reducer],
        compensator=_compensator(recipe),
        rng=np.random.default_rng((recipe.seed, int(view.block.ids[0]))),
    )


def settle(run: Run, blocks: Sequence[Block], progress: Progress) -> float:
    """Settle every block, on statistics where some method needs them; returns seconds inside ONNX Runtime."""
    if needs_data(run.recipe):
        seconds = _measured(run, blocks, progress)
        if run.recipe.compensate == BEST and run.changes:
            run.ledger, run.refits, more = sweep(run.prepared, run.recipe, run.ledger, run.once)
            run.changes = [_validated(change, run.refits) for change in run.changes]
            seconds += more
        return seconds
    for block in blocks:
        run.settle(run.known(block) or run.choose(block, ()))
    return 0.0


def _measured(run: Run, blocks: Sequence[Block], progress: Progress) -> float:
    """Settle every block on statistics; in closed loop each sees the network as decided so far.

    Where decisions are known already, nothing is measured, and the stream follows when it is needed again.

    Returns:
        Seconds spent inside ONNX Runtime.
    """
    prepared, recipe, once = run.prepared, run.recipe, run.once
    todo = steps(blocks, closed_loop=recipe.closed_loop)
    feeds = len(shard_of(once.group, len(prepared.batches)).numbers)
    ticks = iter(range(1, feeds * len(todo) + 1))

    def tick() -> None:
        progress("calibrating", next(ticks), feeds * len(todo))

    heavy, used = bool(in_files(prepared.model)), 0
    with stream_of(prepared, recipe, once.group) as stream:
        walk = _Walk(stream, feeds, tick, moving=len(todo) > 1)
        for step in todo:
            _step(run, walk, step)
            used += sum(_room(block, prepared) for block in step.blocks) if heavy else 0
            if used > PILE:
                give_back()
                used = 0
        return stream.forward


class _Walk:
    """The stream, brought to a step when that has to be measured: in the very runs that measured the ones before."""

    def __init__(self, stream: Stream, feeds: int, tick: Callable[[], None], *, moving: bool) -> None:
        self.stream, self.feeds, self.tick, self._moving = stream, feeds, tick, moving
        self._behind: list[tuple[Step, Ledger]] = []

    def skip(self, step: Step, ledger: Ledger) -> None:
        """Leave out a step whose decisions are known."""
        self._behind.append((step, ledger))
        for _ in range(self.feeds):
            self.tick()

    def measure(self, step: Step, ledger: Ledger) -> list[tuple[Stats, ...]]:
        """Statistics of the blocks of a step."""
        while self._behind:
            known, before = self._behind.pop(0)
            self.stream.walk_past(_probes(known), before, known.limit)
        found = self.stream.measure(_probes(step), ledger, self.tick, step.limit if self._moving else None)
        return by_block(step.blocks, found)


def _probes(step: Step) -> list[Probe]:
    return [p for b in step.blocks for p in b.probes]


def _room(block: Block, prepared: Prepared) -> int:
    """Bytes of a block's weights and second moments."""
    shapes = prepared.survey.facts.shapes
    return 8 * (sum(math.prod(shapes[s.initializer]) for s in block.slots) + sum(p.width**2 for p in block.probes))


def _step(run: Run, walk: _Walk, step: Step) -> None:
    """Measure and settle some blocks; a function of its own, so that nothing of one step is held in the next."""
    before = run.ledger
    known = [run.known(b) for b in step.blocks]
    measured: Sequence[tuple[Stats, ...]] = [()] * len(step.blocks)
    if run.dense is not None and not before.dead.any():  # nothing is narrowed yet: the stream need not be there
        measured = measured if all(known) else [run.dense[b.name] for b in step.blocks]
    elif all(known):
        walk.skip(step, before)
    else:
        measured = walk.measure(step, before)
    for block, change, stats in zip(step.blocks, known, measured, strict=True):
        fold = functools.partial(_joint, run, walk.stream, before)
        run.settle(change or run.choose(block, stats, fold))


def _joint(run: Run, stream: Stream, before: Ledger, change: Change) -> tuple[Stats, ...]:
    """What a fold makes of a block's activations, beside what they were."""
    return stream.measure_fold(change.block.probes, change.reducer.kept, before, run.after(change, before))


def bring_back(run: Run, progress: Progress) -> float:
    """Bring activations back to the dense network's, as the recipe says; returns seconds inside ONNX Runtime."""
    if run.recipe.norms == "none" or not run.changes:
        return 0.0
    run.ledger, run.norms, seconds = norms.bring_back(
        run.prepared, run.recipe, run.ledger, run.changes, run.once, progress
    )
    return seconds


def _validated(change: Change, refits: Sequence[Refit]) -> Change:
    """With the mean held-out error of the layers that read the block's units."""
    mine = {slot.initializer for slot in change.block.consumers}
    errors = [r.after for r in refits if r.weight in mine and r.after is not None]
    if not errors:
        return change
    return dataclasses.replace(change, error=dataclasses.replace(change.error, validation=float(np.mean(errors))))


def _compensator(recipe: Recipe) -> Compensator:
    """The chosen compensator with the recipe's ridge."""
    chosen: Any = COMPENSATORS[recipe.compensate]
    fields = {f.name for f in dataclasses.fields(chosen)}  # plug-ins come wrapped and keep their own ridge
    compensator: Compensator = dataclasses.replace(chosen, alpha=recipe.ridge) if "alpha" in fields else chosen
    return compensator


def needs_data(recipe: Recipe) -> bool:
    """Whether some method of the recipe looks at activations."""
    reducer = REDUCERS[recipe.reducer]
    selecting = reducer.needs_scores and SELECTORS[recipe.selector].needs_data
    return selecting or reducer.needs_data or COMPENSATORS[recipe.compensate].needs_data


def key(block: Block) -> str:
    """Under what a decision about a block is kept."""
    return f"block {block.name}"
