"""From a traced model to decisions: widths, proof, then calibration and compensation block by block."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail import plan, slots
from onnxgrail.algebra.compensate import BEST, COMPENSATORS, Compensator
from onnxgrail.algebra.curves import Narrow
from onnxgrail.algebra.formats import in_range
from onnxgrail.algebra.judge import judge
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.selectors import SELECTORS
from onnxgrail.allocation.choose import allocate, by_ratio, simple
from onnxgrail.allocation.result import Allocation
from onnxgrail.allocation.statistics import NO_FILES, StatsFiles, harm, known
from onnxgrail.calibration.dense import Dense
from onnxgrail.calibration.stream import Stream
from onnxgrail.core import Block, Change, Floats, Progress, Recipe, Refusal, Selector, View, silent
from onnxgrail.graph import weights
from onnxgrail.graph.mapped import weight_files
from onnxgrail.graph.survey import Ledger
from onnxgrail.memory import give_back
from onnxgrail.methods.grail import reduce_and_compensate
from onnxgrail.norms import Norm, bring_back
from onnxgrail.order import Step, steps
from onnxgrail.preparation import Clock, Prepared, proved, stream_of
from onnxgrail.sweep import Refit, sweep

PILE = 2**28  # bytes of arrays that may have come and gone before memory is given back; that takes a while
PROVED = 0.5  # share of each block that goes in a proof before widths are known


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decision:
    """What is to become of the model.

    Attributes:
        chosen: blocks the recipe selects.
        changes: one per narrowed block, in the order they were decided.
        refusals: blocks that did not pass the proof.
        ledger: all changes together.
        refits: consumers fitted to the dense network; norms: activations brought back to the dense network's.
    """

    chosen: tuple[Block, ...]
    changes: tuple[Change, ...]
    refusals: tuple[Refusal, ...]
    ledger: Ledger
    allocation: Allocation
    refits: tuple[Refit, ...] = ()
    norms: tuple[Norm, ...] = ()


def decide(
    prepared: Prepared, recipe: Recipe, clock: Clock, progress: Progress, files: StatsFiles = NO_FILES
) -> Decision:
    """Choose widths, prove that they narrow exactly, then calibrate and compensate.

    Where a budget or the statistics decide, the proof comes first, at half width: blocks that fail it take no part.

    Raises:
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
            blocks, refusals = proved(prepared, recipe, blocks, kept)
    if weight_files(prepared.model):
        give_back()
    with clock.stage("measure"):
        shared = early and recipe.allocate in ("flap", "global") and not recipe.closed_loop and _needs_data(recipe)
        dense = known(prepared, blocks, recipe, files, shared=shared, progress=progress)
    if early:
        with clock.stage("allocate"):
            allocation = allocate(
                prepared,
                blocks,
                recipe,
                dense=dense,
                narrow=_narrow(recipe),
                trial=lambda widths: _trial(prepared, recipe, blocks, widths),
                progress=progress,
            )
        blocks = tuple(b for b in blocks if allocation.widths[b.name] < b.units)
    with clock.stage("calibrate"):
        run = _Run(prepared, recipe, allocation.widths, dense)
        clock.seconds["forward"] = _settled(run, blocks, progress)
    if recipe.compensate == "none" and recipe.reducer == "prune" and _rounds(prepared):
        with clock.stage("prove"):
            refusals += _confirmed(run)
    if recipe.norms != "none":
        with clock.stage("norms"):
            clock.seconds["forward"] += _brought_back(run, progress)
    return Decision(
        chosen=chosen,
        changes=tuple(run.changes),
        refusals=refusals,
        ledger=run.ledger,
        allocation=allocation,
        refits=run.refits,
        norms=run.norms,
    )


def _rounds(prepared: Prepared) -> bool:
    """Whether activations are rounded to integers on the way, so that the last digit of a sum can tip over a step."""
    constants = prepared.survey.facts.constants
    return any(
        node.op_type == "QuantizeLinear" and (node.outputs[0].name or "") not in constants
        for node in prepared.model.graph
    )


def _confirmed(run: _Run) -> tuple[Refusal, ...]:
    """Prove once more, with the units that really go, and take back what does not hold."""
    prepared, blocks = run.prepared, [c.block for c in run.changes]
    if not blocks:
        return ()
    good, refusals = proved(prepared, run.recipe, blocks, run.kept, run.ledger.dead)
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
        run = _Run(part, recipe, widths)
        _settled(run, [b for b in blocks if widths[b.name] < b.units], silent)
        _brought_back(run, silent)
        return run.ledger

    return harm(prepared, recipe, ledger)


class _Run:
    """The decisions so far; lives as long as one call of `decide`."""

    def __init__(self, prepared: Prepared, recipe: Recipe, kept: Mapping[str, int], dense: Dense | None = None) -> None:
        self.prepared, self.recipe, self.kept, self.dense = prepared, recipe, kept, dense
        self.ledger = weights.empty(prepared.survey)
        self.changes: list[Change] = []
        self.refits: tuple[Refit, ...] = ()
        self.norms: tuple[Norm, ...] = ()

    def weights(self, block: Block) -> tuple[Floats, ...]:
        """A block's weights as they are now."""
        return weights.read(block, self.prepared.model, self.prepared.survey, self.ledger)

    def choose(self, view: View) -> Change:
        """Decide one block."""
        return _decided(view, self.kept[view.block.name], self.recipe, SELECTORS[self.recipe.selector])

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
            run.ledger, run.refits, more = sweep(run.prepared, run.recipe, run.ledger)
            run.changes = [_validated(change, run.refits) for change in run.changes]
            seconds += more
        return seconds
    for block in blocks:
        view = View(block=block, weights=run.weights(block), stats=())
        run.settle(run.fitting(view, run.choose(view)))
    return 0.0


def _brought_back(run: _Run, progress: Progress) -> float:
    """Bring activations back to the dense network's, as the recipe says; returns seconds inside ONNX Runtime."""
    if run.recipe.norms == "none" or not run.changes:
        return 0.0
    run.ledger, run.norms, seconds = bring_back(run.prepared, run.recipe, run.ledger, run.changes, progress)
    return seconds


def _validated(change: Change, refits: Sequence[Refit]) -> Change:
    """With the mean held-out error of the layers that read the block's units."""
    mine = {slot.initializer for slot in change.block.consumers}
    errors = [r.after for r in refits if r.weight in mine]
    if not errors:
        return change
    return dataclasses.replace(change, error=dataclasses.replace(change.error, validation=float(np.mean(errors))))


def _measured(run: _Run, blocks: Sequence[Block], progress: Progress) -> float:
    """Settle every block on statistics; in closed loop each sees the network as decided so far.

    Returns:
        Seconds spent inside ONNX Runtime.
    """
    prepared, recipe = run.prepared, run.recipe
    todo = steps(blocks, closed_loop=recipe.closed_loop)
    heavy, used = bool(weight_files(prepared.model)), 0
    total, done = len(prepared.batches) * len(todo), 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress("calibrating", done, total)

    with stream_of(prepared, recipe) as stream:
        for step in todo:
            _step(run, stream, step, tick, moving=len(todo) > 1)
            used += sum(_room(block, prepared) for block in step.blocks) if heavy else 0
            if used > PILE:
                give_back()
                used = 0
        return stream.forward


def _room(block: Block, prepared: Prepared) -> int:
    """Bytes of a block's weights and second moments."""
    shapes = prepared.survey.facts.shapes
    return 8 * (sum(math.prod(shapes[s.initializer]) for s in block.slots) + sum(p.width**2 for p in block.probes))


def _step(run: _Run, stream: Stream, step: Step, tick: Callable[[], None], *, moving: bool) -> None:
    """Measure and settle some blocks; a function of its own, so that nothing of one step is held in the next."""
    before = run.ledger
    if run.dense is not None and not before.dead.any():
        measured = [run.dense[b.name] for b in step.blocks]  # nothing is narrowed yet: known
    else:
        probes = [p for b in step.blocks for p in b.probes]
        found = iter(stream.measure(probes, before, tick, step.limit if moving else None))
        measured = [tuple(next(found) for _ in b.probes) for b in step.blocks]
    for block, stats in zip(step.blocks, measured, strict=True):
        view = View(block=block, weights=run.weights(block), stats=stats)
        change = run.choose(view)
        if change.reducer.cluster is not None:  # averaged statistics promise too much
            joint = stream.measure_fold(block.probes, change.reducer.kept, before, run.after(change, before))
            change = judge(view, change, joint)
        run.settle(run.fitting(view, change))


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
