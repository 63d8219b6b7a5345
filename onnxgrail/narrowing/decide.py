"""Decides what becomes of a traced model: widths, proof, calibration and compensation of every block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onnxgrail.allocation.achieved import Share, of_blocks
from onnxgrail.allocation.choose import at_first
from onnxgrail.allocation.result import Allocation
from onnxgrail.allocation.statistics import NO_FILES, StatsFiles
from onnxgrail.calibration.prepared import Prepared, rounds
from onnxgrail.calibration.proof import proved
from onnxgrail.calibration.stream.dense import Dense
from onnxgrail.core import Block, Change, Refusal
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.choosing import Run
from onnxgrail.narrowing.forecast.expected import foretell
from onnxgrail.narrowing.grail import bring_back, settle
from onnxgrail.narrowing.layers import Refit
from onnxgrail.narrowing.norms import Norm
from onnxgrail.narrowing.ready import ready
from onnxgrail.narrowing.rotation import rotated, with_needed, with_unasked
from onnxgrail.narrowing.widths import allocated, cheap, with_curves
from onnxgrail.recipe import selection


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
    def is_fitted(self) -> bool:
        """Return True if a decision was measured on data."""
        return any(change.error.plain is not None for change in self.changes)

    @property
    def is_empty(self) -> bool:
        """Return True if no block loses a unit, no weight a bit, and neither a search nor a size says that all stay."""
        allocation = self.allocation
        stays = allocation.sheds or (allocation.found is not None and allocation.found.chosen is not None)
        return not self.changes and not allocation.lowers and not stays


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Widths of a model's blocks, before they are decided.

    Attributes:
        prepared: the model, with gradients if the selector reads them.
        chosen, narrowable, refusals, allocation: as in `Decision`.
        blocks: those that lose units.
        dense: statistics of the original model if they also serve to decide the blocks.
    """

    prepared: Prepared
    chosen: tuple[Block, ...]
    narrowable: tuple[Block, ...]
    refusals: tuple[Refusal, ...]
    allocation: Allocation
    blocks: tuple[Block, ...]
    dense: Dense | None


def planned(prepared: Prepared, job: Job, files: StatsFiles = NO_FILES, *, sensitivity: bool | None = False) -> Plan:
    """Choose widths, and prove that the blocks narrow exactly.

    If a budget or statistics decide the widths, the proof comes first, at half width; blocks that fail it take no part.

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
    recipe = job.recipe
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
        with job.clock.stage("curves"):
            allocation = with_curves(prepared, job, blocks, allocation)
    return Plan(
        prepared=prepared,
        chosen=chosen,
        narrowable=tuple(b for b in chosen if b.units > 1 and b.name not in failed),
        refusals=refusals,
        allocation=allocation,
        blocks=blocks,
        dense=dense,
    )


def settled(plan: Plan, job: Job) -> Decision:
    """Calibrate and compensate all blocks of a plan.

    If several processes share the work, the first one decides and the others follow. Errors are those of `planned`.
    """
    recipe, clock, prepared, refusals = job.recipe, job.clock, plan.prepared, plan.refusals
    with clock.stage("calibrate"):
        run = Run(prepared, job, plan.allocation.widths, plan.dense)
        clock.seconds["forward"] = settle(run, plan.blocks)
    if recipe.compensate == "none" and recipe.reducer == "prune" and rounds(prepared):
        with clock.stage("prove"):
            refusals += _confirmed(run)
    if recipe.norms != "none":
        with clock.stage("norms"):
            clock.seconds["forward"] += bring_back(run)
    return Decision(
        chosen=plan.chosen,
        narrowable=plan.narrowable,
        changes=tuple(run.changes),
        refusals=refusals,
        ledger=run.ledger,
        allocation=plan.allocation,
        share=of_blocks(prepared, recipe, plan.narrowable, _kept(run.changes)),
        refits=run.refits,
        norms=run.norms,
    )


def decided(
    prepared: Prepared,
    job: Job,
    files: StatsFiles = NO_FILES,
    sensitivity: bool | None = False,
    *,
    told: bool = False,
) -> tuple[Prepared, Decision]:
    """Rotate streams and tables, and decide what becomes of the model; those that keep all channels are not rotated.

    Errors are those of `planned`.

    Args:
        prepared: the model and its data.
        job: as in `planned`.
        files: as in `planned`.
        sensitivity: as in `planned`.
        told: tell beforehand what the run is expected to take.

    Returns:
        The model that the decision is about, and the decision.
    """
    if told and job.first:
        foretell(prepared, job)
    prepared = rotated(prepared, job)
    plan = planned(prepared, job, files, sensitivity=sensitivity)
    widths = {block.name: plan.allocation.widths[block.name] for block in plan.blocks}
    left = with_needed(prepared, widths, job.recipe)
    if left is prepared:
        return with_unasked(prepared, job.recipe), settled(plan, job)
    job = replace(job, recipe=replace(job.recipe, widths=widths))
    decision = settled(planned(left, job), job)
    share = of_blocks(prepared, job.recipe, plan.narrowable, _kept(decision.changes))
    refusals = tuple(dict.fromkeys((*plan.refusals, *decision.refusals)))
    return with_unasked(left, job.recipe), replace(
        decision,
        chosen=plan.chosen,
        narrowable=plan.narrowable,
        allocation=plan.allocation,
        refusals=refusals,
        share=share,
    )


def _kept(changes: Sequence[Change]) -> dict[str, int]:
    """Return block name to units that stay."""
    return {change.block.name: change.reducer.kept.size for change in changes}


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
