"""Decides what becomes of a traced model: widths, proof, calibration and compensation of every block."""

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
CHEAP = 64, 5e12  # most blocks and multiply-accumulates for which error curves are measured by default


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decision:
    """All decisions about a model.

    Attributes:
        chosen: blocks the recipe selects.
        narrowable: those of them that can be narrowed and passed the proof.
        changes: one per narrowed block, in the order they were decided.
        refusals: blocks that did not pass the proof.
        ledger: all changes together.
        refits: layers fitted to the dense network; norms: activations with corrected scales and biases.
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
    """Choose widths, prove that the blocks narrow exactly, then calibrate and compensate.

    If a budget or statistics decide the widths, the proof comes first, at half width; blocks that fail it take no part.
    If several processes share the work, the first one decides and the others follow.

    Args:
        prepared: the model and its data.
        job: the recipe, the clock, and cached decisions of earlier runs.
        files: files to read statistics from or to write them to.
        sensitivity: True to also measure error curves of all blocks if no width needs them (first process only); None
            to do so if it is cheap.

    Raises:
        LostProcessError: another process failed.
        UsageError: a name pattern is not a regular expression, or a budget is out of reach.
        DataError: activations hold NaN or infinity, or statistics belong to another model or other data.
        ModelError: weights hold NaN or infinity.
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
    """Compute the widths under a budget (given widths are kept if the recipe alone fixes them).

    Returns:
        The allocation, and the statistics of the original model if they also serve to decide the blocks, else None.
    """
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
    """Return True if error curves take about a minute at most: each block is tried alone, in the whole model."""
    most, macs = CHEAP
    return len(blocks) <= most and len(blocks) * impact_macs(prepared) <= macs


def _with_gradients(prepared: Prepared, blocks: Sequence[Block], job: Job) -> Prepared:
    """Return the prepared model with the gradients that the selector reads, computed by the first process."""
    from onnxgrail.narrowing.gradients import regional_gradients  # slow to import

    gradients = job.steps.once(
        "gradients", lambda: regional_gradients(prepared, blocks, job.recipe, job.progress), ARRAYS
    )
    return dataclasses.replace(prepared, gradients=gradients)


def _reads_original(recipe: Recipe) -> bool:
    """Return True if widths follow from statistics of the original model."""
    return not simple(recipe) and recipe.allocate in ("flap", "global")


def _serves_twice(recipe: Recipe, files: StatsFiles, blocks: Sequence[Block]) -> bool:
    """Return True if statistics of the original model serve to decide the blocks, and not only their widths."""
    small = sum(map(size_of, blocks)) <= TOGETHER
    original = recipe.compensate == BEST or not recipe.closed_loop
    return (_reads_original(recipe) and original and small and needs_data(recipe)) or files != NO_FILES


def _dense(prepared: Prepared, job: Job, blocks: Sequence[Block], files: StatsFiles, twice: bool) -> Dense | None:
    """Read or measure statistics of the original model; None if nothing needs them more than once."""
    shared = twice or (_reads_original(job.recipe) and job.group.size > 1)
    together = sys.maxsize if twice else TOGETHER
    return known(prepared, blocks, job, files, shared=shared, together=together)


def _confirmed(run: Run) -> tuple[Refusal, ...]:
    """Prove again with the units that are really removed, and take back the changes of blocks that fail."""
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
    """Return a function that decides a block at any width; the scores of its units are computed once."""
    scores = functools.lru_cache(maxsize=1)(
        lambda view: SELECTORS[recipe.selector](view, np.random.default_rng((recipe.seed, int(view.block.ids[0]))))
    )

    def narrow(view: View, kept: int) -> Change:
        return decided(view, kept, recipe, lambda one, _: scores(one))

    return narrow


def _trial(prepared: Prepared, job: Job, blocks: Sequence[Block], widths: Mapping[str, int]) -> float:
    """Compute the end-to-end error of the model at these widths, decided with the same recipe."""

    def ledger(part: Prepared) -> Ledger:
        run = Run(part, Job(recipe=job.recipe), widths)
        settle(run, [b for b in blocks if widths[b.name] < b.units])
        bring_back(run)
        return run.ledger

    return harm(prepared, job.recipe, ledger)
