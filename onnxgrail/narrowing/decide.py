"""From a traced model to decisions: widths, proof, then calibration and compensation block by block."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.fit.compensate import BEST
from onnxgrail.algebra.moments.curves import Narrow
from onnxgrail.algebra.select.selectors import GRADIENTS, SELECTORS
from onnxgrail.allocation.choose import allocate, at_first, simple
from onnxgrail.allocation.losses import alone, curves_of, search_of
from onnxgrail.allocation.result import Allocation, allocation_of, of_allocation
from onnxgrail.allocation.statistics import NO_FILES, StatsFiles, harm, impact_macs, known
from onnxgrail.calibration.prepare import Prepared, proved, rounds
from onnxgrail.calibration.stream.dense import TOGETHER, Dense, size_of
from onnxgrail.core import Block, Change, Floats, Recipe, Refusal, View
from onnxgrail.graph.io.mapped import in_files
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.machine.memory import give_back
from onnxgrail.machine.steps.codec import Record
from onnxgrail.machine.steps.steps import Codec
from onnxgrail.narrowing.choosing import Run, decided, key, needs_data
from onnxgrail.narrowing.grail import bring_back, settle
from onnxgrail.narrowing.layers import Refit
from onnxgrail.narrowing.norms import Norm
from onnxgrail.recipe import selection

ARRAYS: Codec[Mapping[str, Floats]] = Codec(lambda arrays: Record(arrays=arrays), lambda record: record.arrays)
CHEAP = 64, 5e12  # blocks and multiply-accumulates up to which curves that nobody asked for are measured


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decision:
    """What is to become of the model.

    Attributes:
        chosen: blocks the recipe selects.
        narrowable: those of them that can be narrowed and passed the proof.
        changes: one per narrowed block, in the order they were decided.
        refusals: blocks that did not pass the proof.
        ledger: all changes together.
        refits: consumers fitted to the dense network; norms: activations brought back to the dense network's.
    """

    chosen: tuple[Block, ...]
    narrowable: tuple[Block, ...]
    changes: tuple[Change, ...]
    refusals: tuple[Refusal, ...]
    ledger: Ledger
    allocation: Allocation
    refits: tuple[Refit, ...] = ()
    norms: tuple[Norm, ...] = ()


def decide(prepared: Prepared, job: Job, files: StatsFiles = NO_FILES, *, sensitivity: bool | None = False) -> Decision:
    """Choose widths, prove that they narrow exactly, then calibrate and compensate.

    Where a budget or the statistics decide, the proof comes first, at half width: blocks that fail it take no part.
    Where several processes share the work, the first one decides and the others follow it.

    Args:
        prepared: the model and its data.
        job: choices, clock, and what earlier runs have decided.
        files: statistics to read or to write.
        sensitivity: also measure error curves of all blocks where no width needs them; the first process does.  None:
            where that is cheap.

    Raises:
        LostProcessError: another process failed.
        UsageError: a name pattern is not a regular expression, or a budget is out of reach.
        DataError, ModelError: activations or weights hold NaN or infinity, or statistics belong to something else.
    """
    recipe, clock = job.recipe, job.clock
    chosen = selection.selected(prepared.survey.blocks, recipe)
    allocation = at_first(prepared, chosen, recipe)
    kept = allocation.widths
    blocks = tuple(b for b in chosen if kept[b.name] < b.units)
    refusals: tuple[Refusal, ...] = ()
    failed: set[str] = set()
    with clock.stage("prove"):
        if blocks:
            failed = {b.name for b in blocks}
            blocks, refusals = proved(prepared, recipe, blocks, kept, group=job.group)
            failed -= {b.name for b in blocks}
    if in_files(prepared.model):
        give_back()
    if recipe.selector in GRADIENTS and blocks:
        with clock.stage("gradients"):
            prepared = _with_gradients(prepared, blocks, job)
    allocation, dense = _allocated(prepared, job, blocks, allocation, files)
    blocks = tuple(b for b in blocks if allocation.narrows(b))
    wanted = _cheap(prepared, blocks) if sensitivity is None else sensitivity
    if wanted and blocks and not allocation.curves and job.first:
        with clock.stage("curves"):
            search = search_of(prepared, blocks, recipe, narrow=_narrow(recipe), progress=job.progress)
            allocation = dataclasses.replace(allocation, curves=curves_of(alone(search)))
    with clock.stage("calibrate"):
        run = Run(prepared, job, allocation.widths, dense)
        clock.seconds["forward"] = settle(run, blocks)
    if recipe.compensate == "none" and recipe.reducer == "prune" and rounds(prepared):
        with clock.stage("prove"):
            refusals += _confirmed(run)
    if recipe.norms != "none":
        with clock.stage("norms"):
            clock.seconds["forward"] += bring_back(run)
    return Decision(
        chosen=chosen,
        narrowable=tuple(b for b in chosen if b.units > 1 and b.name not in failed),
        changes=tuple(run.changes),
        refusals=refusals,
        ledger=run.ledger,
        allocation=allocation,
        refits=run.refits,
        norms=run.norms,
    )


def _allocated(
    prepared: Prepared, job: Job, blocks: Sequence[Block], allocation: Allocation, files: StatsFiles
) -> tuple[Allocation, Dense | None]:
    """Widths under a budget, or the given ones where a ratio says all; and statistics that also decide the blocks."""
    recipe, steps, clock = job.recipe, job.steps, job.clock
    given = simple(recipe)
    done = None if given else steps.known("allocation")
    with clock.stage("measure"):
        widths = allocation if done is None else allocation_of(done)
        over = (given or done is not None) and steps.finished(key(b) for b in blocks if widths.narrows(b))
        twice = _serves_twice(recipe, files, blocks)
        dense = None if over and files.write is None else _dense(prepared, job, blocks, files, twice)
    if not given:
        with clock.stage("allocate"):
            trial, narrow = functools.partial(_trial, prepared, job, blocks), _narrow(recipe)
            search = search_of(prepared, blocks, recipe, dense=dense, narrow=narrow, trial=trial, progress=job.progress)
            made = done or steps.make("allocation", lambda: of_allocation(allocate(search)))
            allocation = allocation_of(made)
    return allocation, dense if twice else None


def _cheap(prepared: Prepared, blocks: Sequence[Block]) -> bool:
    """Whether curves take a minute or so at most: every block is tried alone, in the whole model."""
    most, macs = CHEAP
    return len(blocks) <= most and len(blocks) * impact_macs(prepared) <= macs


def _with_gradients(prepared: Prepared, blocks: Sequence[Block], job: Job) -> Prepared:
    """With the gradients that the selector reads, taken by the first process."""
    from onnxgrail.narrowing.gradients import regional_gradients  # slow to import

    gradients = job.steps.once(
        "gradients", lambda: regional_gradients(prepared, blocks, job.recipe, job.progress), ARRAYS
    )
    return dataclasses.replace(prepared, gradients=gradients)


def _reads_original(recipe: Recipe) -> bool:
    """Whether widths follow from statistics of the original model."""
    return not simple(recipe) and recipe.allocate in ("flap", "global")


def _serves_twice(recipe: Recipe, files: StatsFiles, blocks: Sequence[Block]) -> bool:
    """Whether statistics of the original model also serve to decide its blocks, and not only their widths."""
    small = sum(map(size_of, blocks)) <= TOGETHER
    original = recipe.compensate == BEST or not recipe.closed_loop
    return (_reads_original(recipe) and original and small and needs_data(recipe)) or files != NO_FILES


def _dense(prepared: Prepared, job: Job, blocks: Sequence[Block], files: StatsFiles, twice: bool) -> Dense | None:
    """Statistics of the original model, where they are kept, serve twice, or have to be measured by all processes."""
    shared = twice or (_reads_original(job.recipe) and job.group.size > 1)
    together = sys.maxsize if twice else TOGETHER
    return known(prepared, blocks, job, files, shared=shared, together=together)


def _confirmed(run: Run) -> tuple[Refusal, ...]:
    """Prove once more, with the units that really go, and take back what does not hold."""
    prepared, blocks = run.prepared, [c.block for c in run.changes]
    if not blocks:
        return ()
    good, refusals = proved(prepared, run.recipe, blocks, run.kept, run.ledger.dead, group=run.job.group)
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
        return decided(view, kept, recipe, lambda one, _: scores(one))

    return narrow


def _trial(prepared: Prepared, job: Job, blocks: Sequence[Block], widths: Mapping[str, int]) -> float:
    """End-to-end error of the model at these widths, decided with this very recipe."""

    def ledger(part: Prepared) -> Ledger:
        run = Run(part, Job(recipe=job.recipe), widths)
        settle(run, [b for b in blocks if widths[b.name] < b.units])
        bring_back(run)
        return run.ledger

    return harm(prepared, job.recipe, ledger)
