"""From a traced model to decisions: widths, proof, then calibration and compensation block by block."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail import plan
from onnxgrail.algebra.compensate import BEST, COMPENSATORS, Compensator
from onnxgrail.algebra.curves import Narrow
from onnxgrail.algebra.judge import judge
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.selectors import SELECTORS
from onnxgrail.allocation.choose import allocate, by_ratio, simple
from onnxgrail.allocation.result import Allocation, allocation_of, of_allocation
from onnxgrail.allocation.statistics import NO_FILES, StatsFiles, harm, known
from onnxgrail.calibration.dense import TOGETHER, Dense, by_block
from onnxgrail.calibration.stream import Stream
from onnxgrail.core import Block, Change, Floats, Progress, Recipe, Refusal, Selector, Stats, View, silent
from onnxgrail.graph import weights
from onnxgrail.graph.survey import Ledger
from onnxgrail.journal import NO_JOURNAL, Journal
from onnxgrail.methods.grail import reduce_and_compensate
from onnxgrail.once import Once
from onnxgrail.order import steps
from onnxgrail.parallel import SOLO, Group, shard_of
from onnxgrail.preparation import Clock, Prepared
from onnxgrail.proving import proved, rounds
from onnxgrail.record import Record, change_of, of_change
from onnxgrail.sweep import Refit, sweep

Fold = Callable[[Change], tuple[Stats, ...]]
"""What a fold makes of a block's activations."""
PROVED = 0.5  # share of each block that goes in a proof before widths are known


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decision:
    """What is to become of the model.

    Attributes:
        chosen: blocks the recipe selects.
        changes: one per narrowed block, in the order they were decided.
        refusals: blocks that did not pass the proof.
        ledger: all changes together.
        refits: consumers fitted to the dense network.
    """

    chosen: tuple[Block, ...]
    changes: tuple[Change, ...]
    refusals: tuple[Refusal, ...]
    ledger: Ledger
    allocation: Allocation
    refits: tuple[Refit, ...] = ()


def decide(
    prepared: Prepared,
    recipe: Recipe,
    clock: Clock,
    progress: Progress,
    files: StatsFiles = NO_FILES,
    *,
    journal: Journal = NO_JOURNAL,
    group: Group = SOLO,
) -> Decision:
    """Choose widths, prove that they narrow exactly, then calibrate and compensate.

    Where a budget or the statistics decide, the proof comes first, at half width: blocks that fail it take no part.
    Where several processes share the work, the first one decides and the others follow it.

    Args:
        prepared: the model and its data.
        recipe: the user's choices.
        clock: seconds per stage are added to it.
        progress: told as work goes on.
        files: statistics to read or to write.
        journal: what an earlier, killed run has decided is taken from here; what this one decides is kept here.
        group: the processes that share the work.

    Raises:
        LostProcessError: another process failed.
        UsageError: a name pattern is not a regular expression, or a budget is out of reach.
        DataError, ModelError: activations or weights hold NaN or infinity, or statistics belong to something else.
    """
    chosen = plan.selected(prepared.survey.blocks, recipe)
    allocation = by_ratio(prepared, chosen, recipe)
    early = not simple(recipe)
    kept = plan.widths(chosen, PROVED, 1) if early else allocation.widths
    blocks = tuple(b for b in chosen if kept[b.name] < b.units)
    refusals: tuple[Refusal, ...] = ()
    with clock.stage("prove"):
        if blocks:
            blocks, refusals = proved(prepared, recipe, blocks, kept, group)
    once = Once(journal=journal, group=group)
    done = once.known("allocation") if early else None
    with clock.stage("measure"):
        widths = allocation if done is None else allocation_of(done)
        over = (done is not None or not early) and once.finished(_key(b) for b in blocks if widths.narrows(b))
        dense = None if over and files.write is None else _dense(prepared, recipe, blocks, files, once, progress)
    if early:
        with clock.stage("allocate"):
            trial = functools.partial(_trial, prepared, recipe, blocks)
            spread = functools.partial(allocate, prepared, blocks, recipe, dense=dense, narrow=_narrow(recipe))
            made = done or once.make("allocation", lambda: of_allocation(spread(trial=trial, progress=progress)))
            allocation = allocation_of(made)
        blocks = tuple(b for b in blocks if allocation.narrows(b))
    with clock.stage("calibrate"):
        run = _Run(prepared, recipe, allocation.widths, once, dense if _serves_twice(recipe, files) else None)
        clock.seconds["forward"] = _settled(run, blocks, progress)
    if recipe.compensate == "none" and recipe.reducer == "prune" and rounds(prepared):
        with clock.stage("prove"):
            refusals += _confirmed(run, group)
    return Decision(
        chosen=chosen,
        changes=tuple(run.changes),
        refusals=refusals,
        ledger=run.ledger,
        allocation=allocation,
        refits=run.refits,
    )


def _reads_original(recipe: Recipe) -> bool:
    """Whether widths follow from statistics of the original model."""
    return not simple(recipe) and recipe.allocate in ("flap", "global")


def _serves_twice(recipe: Recipe, files: StatsFiles) -> bool:
    """Whether statistics of the original model also serve to decide its blocks, and not only their widths."""
    open_loop = _reads_original(recipe) and not recipe.closed_loop and _needs_data(recipe)
    return open_loop or files != NO_FILES


def _dense(
    prepared: Prepared, recipe: Recipe, blocks: Sequence[Block], files: StatsFiles, once: Once, progress: Progress
) -> Dense | None:
    """Statistics of the original model, where they are kept, serve twice, or have to be measured by all processes."""
    twice = _serves_twice(recipe, files)
    shared = twice or (_reads_original(recipe) and once.group.size > 1)
    together = sys.maxsize if twice else TOGETHER
    return known(prepared, blocks, recipe, files, shared=shared, together=together, progress=progress, group=once.group)


def _confirmed(run: _Run, group: Group) -> tuple[Refusal, ...]:
    """Prove once more, with the units that really go, and take back what does not hold."""
    prepared, blocks = run.prepared, [c.block for c in run.changes]
    if not blocks:
        return ()
    good, refusals = proved(prepared, run.recipe, blocks, run.kept, group, run.ledger.dead)
    if refusals:
        names = {b.name for b in good}
        changes, run.changes, run.ledger = run.changes, [], weights.empty(prepared.survey)
        for change in changes:
            if change.block.name in names:
                run.settle(change)
    return refusals


def _narrow(recipe: Recipe) -> Narrow:
    """How a block is decided at any width, its units scored once."""
    scores = functools.lru_cache(maxsize=1)(
        lambda view: SELECTORS[recipe.selector](view, np.random.default_rng((recipe.seed, int(view.block.ids[0]))))
    )

    def narrow(view: View, kept: int) -> Change:
        return _decided(view, kept, recipe, lambda one, _: scores(one))

    return narrow


def _trial(prepared: Prepared, recipe: Recipe, blocks: Sequence[Block], widths: Mapping[str, int]) -> float:
    """End-to-end error of the model at these widths, decided with this very recipe."""

    def ledger(part: Prepared) -> Ledger:
        run = _Run(part, recipe, widths, Once())
        _settled(run, [b for b in blocks if widths[b.name] < b.units], silent)
        return run.ledger

    return harm(prepared, recipe, ledger)


class _Run:
    """The decisions so far; lives as long as one call of `decide`."""

    def __init__(
        self, prepared: Prepared, recipe: Recipe, kept: Mapping[str, int], once: Once, dense: Dense | None = None
    ) -> None:
        self.prepared, self.recipe, self.kept, self.once, self.dense = prepared, recipe, kept, once, dense
        self.ledger = weights.empty(prepared.survey)
        self.changes: list[Change] = []
        self.refits: tuple[Refit, ...] = ()

    def weights(self, block: Block) -> tuple[Floats, ...]:
        """A block's weights as they are now."""
        return weights.read(block, self.prepared.model, self.prepared.survey, self.ledger)

    def known(self, block: Block) -> Change | None:
        """What a run that went before decided about a block."""
        found = self.once.known(_key(block))
        return None if found is None else change_of(found, block)

    def choose(self, block: Block, stats: tuple[Stats, ...], fold: Fold | None = None) -> Change:
        """Decide one block; with `fold`, an average over clusters is judged on the activations it really gives."""
        once, scores = self.once, SELECTORS[self.recipe.selector]
        view = functools.cache(lambda: View(block=block, weights=self.weights(block), stats=stats))
        found = once.shared(lambda: of_change(_decided(view(), self.kept[block.name], self.recipe, scores)))
        change = change_of(found, block)
        if fold is not None and change.reducer.cluster is not None:  # averaged statistics promise too much
            joint = fold(change)
            found = once.shared(lambda: of_change(judge(view(), change, joint)))
        once.keep(_key(block), found)
        return change_of(found, block)

    def settle(self, change: Change) -> None:
        """Write a decision into the ledger."""
        self.changes.append(change)
        self.ledger = self.after(change, self.ledger)

    def after(self, change: Change, ledger: Ledger) -> Ledger:
        """A ledger with one more decision."""
        return weights.record(change, self.prepared.model, self.prepared.survey, ledger)


def _decided(view: View, kept: int, recipe: Recipe, selector: Selector) -> Change:
    """One block at one width."""
    return reduce_and_compensate(
        view,
        kept,
        selector=selector,
        reducer=REDUCERS[recipe.reducer],
        compensator=_compensator(recipe),
        rng=np.random.default_rng((recipe.seed, int(view.block.ids[0]))),
    )


def _settled(run: _Run, blocks: Sequence[Block], progress: Progress) -> float:
    """Settle every block, on statistics where some method needs them; returns seconds inside ONNX Runtime."""
    if _needs_data(run.recipe):
        seconds = _measured(run, blocks, progress)
        if run.recipe.compensate == BEST and run.changes:
            run.ledger, run.refits, more = _swept(run)
            seconds += more
        return seconds
    for block in blocks:
        run.settle(run.known(block) or run.choose(block, ()))
    return 0.0


def _measured(run: _Run, blocks: Sequence[Block], progress: Progress) -> float:
    """Settle every block on statistics; in closed loop each sees the network as decided so far.

    Where decisions are known already, nothing is measured, and the stream follows when it is needed again.

    Returns:
        Seconds spent inside ONNX Runtime.
    """
    prepared, recipe, once = run.prepared, run.recipe, run.once
    todo = steps(blocks, closed_loop=recipe.closed_loop and recipe.compensate != BEST)
    feeds = len(shard_of(once.group, len(prepared.batches)).numbers)
    ticks = iter(range(1, feeds * len(todo) + 1))

    def tick() -> None:
        progress("calibrating", next(ticks), feeds * len(todo))

    with Stream(
        prepared.model,
        prepared.survey,
        prepared.batches,
        providers=recipe.providers,
        folder=prepared.folder,
        group=once.group,
    ) as stream:
        behind: list[tuple[Ledger, int]] = []
        for step in todo:
            before = run.ledger
            known = [run.known(b) for b in step.blocks]
            at_hand = run.dense is not None and not before.dead.any()  # nothing is narrowed yet
            if not at_hand:
                behind.append((before, step.limit))
            measured: Sequence[tuple[Stats, ...]] = [()] * len(step.blocks)
            if all(known):
                for _ in range(feeds):
                    tick()
            elif run.dense is not None and at_hand:
                measured = [run.dense[b.name] for b in step.blocks]
            else:
                while behind:
                    stream.advance(*behind.pop(0))
                measured = by_block(
                    step.blocks, stream.measure([p for b in step.blocks for p in b.probes], before, tick)
                )
            for block, change, stats in zip(step.blocks, known, measured, strict=True):
                fold = functools.partial(_joint, run, stream, before)
                run.settle(change or run.choose(block, stats, fold))
        return stream.forward


def _joint(run: _Run, stream: Stream, before: Ledger, change: Change) -> tuple[Stats, ...]:
    """What a fold makes of a block's activations, beside what they were."""
    return stream.measure_fold(change.block.probes, change.reducer.kept, before, run.after(change, before))


def _swept(run: _Run) -> tuple[Ledger, tuple[Refit, ...], float]:
    """All consumers fitted to the dense network, by the first process."""

    def swept() -> Record:
        ledger, refits, seconds = sweep(run.prepared, run.recipe, run.ledger)
        arrays = {f"array {name}": array for name, array in ledger.arrays.items()}
        arrays |= {f"shift {name}": array for name, array in ledger.shifts.items()}
        return Record(arrays=arrays, notes={"refits": [dataclasses.asdict(r) for r in refits], "seconds": seconds})

    found = run.once.known("sweep") or run.once.make("sweep", swept)
    parts = {
        kind: {name.removeprefix(kind): array for name, array in found.arrays.items() if name.startswith(kind)}
        for kind in ("array ", "shift ")
    }
    ledger = dataclasses.replace(run.ledger, arrays=parts["array "], shifts=parts["shift "])
    return ledger, tuple(Refit(**row) for row in found.notes["refits"]), float(found.notes["seconds"])


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


def _key(block: Block) -> str:
    """Under what a decision about a block is kept."""
    return f"block {block.name}"
