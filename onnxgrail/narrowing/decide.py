"""Decides what becomes of a traced model: widths, proof, calibration and compensation of every block."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxgrail.algebra.select.selectors import GRADIENTS
from onnxgrail.allocation.achieved import Share, of_blocks
from onnxgrail.allocation.choose import at_first
from onnxgrail.allocation.result import Allocation
from onnxgrail.allocation.statistics import NO_FILES, StatsFiles
from onnxgrail.calibration.prepared import Prepared, rounds
from onnxgrail.calibration.proof import proved
from onnxgrail.core import Block, Change, Floats, Refusal
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.narrowing.choosing import Run
from onnxgrail.narrowing.grail import bring_back, settle
from onnxgrail.narrowing.layers import Refit
from onnxgrail.narrowing.norms import Norm
from onnxgrail.narrowing.widths import allocated, cheap, with_curves
from onnxgrail.recipe import selection

ARRAYS: Codec[Mapping[str, Floats]] = Codec(lambda arrays: Record(arrays=arrays), lambda record: record.arrays)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decision:
    """All decisions about a model.

    Attributes:
        chosen: blocks the recipe selects.
        narrowable: those of them that can be narrowed and passed the proof.
        changes: one per narrowed block, in the order they were decided.
        refusals: blocks that did not pass the proof.
        ledger: all changes together.
        share: what was asked for, and what the changes remove.
        refits: layers fitted to the dense network; norms: activations with corrected scales and biases.
    """

    chosen: tuple[Block, ...]
    narrowable: tuple[Block, ...]
    changes: tuple[Change, ...]
    refusals: tuple[Refusal, ...]
    ledger: Ledger
    allocation: Allocation
    share: Share
    refits: tuple[Refit, ...] = ()
    norms: tuple[Norm, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Return True if no block loses a unit, no weight a bit, and no search found that all should stay."""
        found = self.allocation.found
        return not self.changes and not self.allocation.lowers and (found is None or found.chosen is None)


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
    if recipe.refine and files == NO_FILES:  # a file holds statistics of all data
        prepared = prepared.before_refinement()
    chosen = selection.selected(prepared.survey.blocks, recipe)
    allocation = at_first(prepared, chosen, recipe)
    prepared, blocks, refusals = ready(prepared, job, chosen, allocation.widths)
    failed = {b.name for b in chosen if allocation.narrows(b)} - {b.name for b in blocks}
    allocation, dense = allocated(prepared, job, blocks, allocation, files)
    blocks = tuple(b for b in blocks if allocation.narrows(b))
    wanted = cheap(prepared, blocks) if sensitivity is None else sensitivity
    if wanted and blocks and not allocation.curves and job.first:
        with clock.stage("curves"):
            allocation = with_curves(prepared, job, blocks, allocation)
    with clock.stage("calibrate"):
        run = Run(prepared, job, allocation.widths, dense)
        clock.seconds["forward"] = settle(run, blocks)
    if recipe.compensate == "none" and recipe.reducer == "prune" and rounds(prepared):
        with clock.stage("prove"):
            refusals += _confirmed(run)
    if recipe.norms != "none":
        with clock.stage("norms"):
            clock.seconds["forward"] += bring_back(run)
    narrowable = tuple(b for b in chosen if b.units > 1 and b.name not in failed)
    return Decision(
        chosen=chosen,
        narrowable=narrowable,
        changes=tuple(run.changes),
        refusals=refusals,
        ledger=run.ledger,
        allocation=allocation,
        share=of_blocks(prepared, recipe, narrowable, run.ledger.dead),
        refits=run.refits,
        norms=run.norms,
    )


def ready(
    prepared: Prepared, job: Job, chosen: Sequence[Block], widths: Mapping[str, int]
) -> tuple[Prepared, tuple[Block, ...], tuple[Refusal, ...]]:
    """Prove that blocks narrow exactly, and compute the gradients that the selector reads.

    Args:
        prepared: the model and its data.
        job: the run.
        chosen: the blocks that the recipe selects.
        widths: block name to units at which the blocks are proved; those with all units are not.

    Returns:
        The model with gradients, the blocks that passed the proof, and the refusals of the others.
    """
    blocks = tuple(b for b in chosen if widths[b.name] < b.units)
    refusals: tuple[Refusal, ...] = ()
    with job.clock.stage("prove"):
        if blocks:
            blocks, refusals = proved(prepared, job, blocks, widths)
    if job.recipe.selector in GRADIENTS and blocks:
        with job.clock.stage("gradients"):
            prepared = _with_gradients(prepared, blocks, job)
    return prepared, blocks, refusals


def _with_gradients(prepared: Prepared, blocks: Sequence[Block], job: Job) -> Prepared:
    """Return the prepared model with the gradients that the selector reads, computed by the first process."""
    from onnxgrail.narrowing.gradients import regional_gradients  # slow to import

    gradients = job.steps.once(
        "gradients", lambda: regional_gradients(prepared, blocks, job.recipe, job.progress), ARRAYS
    )
    return dataclasses.replace(prepared, gradients=gradients)


def _confirmed(run: Run) -> tuple[Refusal, ...]:
    """Prove again with the units that are really removed, and take back the changes of blocks that fail."""
    prepared, blocks = run.prepared, [c.block for c in run.changes]
    if not blocks:
        return ()
    good, refusals = proved(prepared, run.job, blocks, run.kept, run.ledger.dead)
    if refusals:
        names = {b.name for b in good}
        changes, run.changes, run.ledger = run.changes, [], weights.empty(prepared.survey)
        for change in changes:
            if change.block.name in names:
                run.settle(change)
    return refusals
