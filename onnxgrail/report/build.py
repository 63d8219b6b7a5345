"""Build the report of a compression from the results of all stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from onnxgrail.calibration.prepared import Prepared, judged_by, narrowed
from onnxgrail.core import Block, BlockError, Change, Ints, Outcome, Slot
from onnxgrail.graph.cuts.places import located, nodes_of
from onnxgrail.graph.io.mapped import loose
from onnxgrail.graph.rewrite.interface import between
from onnxgrail.graph.stored.declared import LaidOut, laid_out
from onnxgrail.graph.stored.integers import Stored
from onnxgrail.graph.trace.facts import key
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.decide import Decision
from onnxgrail.options import WEIGHTS
from onnxgrail.recipe.storage import mark
from onnxgrail.report.environment import calibration_entry
from onnxgrail.report.notes import notes_of
from onnxgrail.report.report import Report, Verification
from onnxgrail.report.result import Result
from onnxgrail.report.sections import Sections, make_report
from onnxgrail.report.sizes import Made, sizes_of

AxisSizes = Mapping[str, tuple[int, ...]]


def report_of(prepared: Prepared, job: Job, decision: Decision, made: Made) -> Report:
    """Return the report of a run in schema 1: all decisions, results and refusals."""
    recipe, refines, applied = job.recipe, made.worked.refined, made.worked.applied
    decided = {c.block.name: c for c in decision.changes}
    sizes = sizes_of(prepared, recipe, decision, made)
    survey = prepared.shown
    refusals = survey.refusals if "grail" in recipe.method else ()  # why blocks stay, where any were to be narrowed
    ports = () if made.slim is None else between(prepared.model, made.slim)
    fitted = bool(applied or decision.norms or decision.is_fitted)  # to the data
    rounded = (recipe.quantize in WEIGHTS or decision.allocation.lowers) and not prepared.batches.synthetic
    read = fitted or rounded or recipe.quantize == "int8"
    calibration = calibration_entry(prepared.batches) if read else None
    named = {key(node): node.name for node in prepared.model.graph if node.name}
    names = {slot.initializer for block in survey.blocks for slot in block.slots}
    stored: dict[str, Stored | LaidOut] = {**survey.facts.stored, **laid_out(prepared.model, survey.facts, names)}
    sections = Sections(
        model=sizes,
        blocks=[
            block_entry(b, decided.get(b.name), survey.facts.shapes, stored, nodes=nodes)
            for b, nodes in zip(survey.blocks, nodes_of(prepared.model, survey.blocks), strict=True)
        ],
        refusals=located(
            prepared.model, [*refusals, *decision.refusals, *(r for one in applied.values() for r in one.refusals)]
        ),
        verification=_told(prepared, made.verification, fitted=fitted),
        calibration=calibration,
        interface=ports,
        tables=[dataclasses.asdict(table) for table in prepared.trimmed],
        notes=[
            prepared.scarce() if calibration else "",
            *notes_of(prepared, recipe, decision, sizes.budget, ports, made.slim),
            *(note for one in applied.values() for note in one.notes),
            *(() if prepared.held_out is None else prepared.held_out.batches.notes),
            _unlike(prepared, made.verification),
        ],
        allocation=decision.allocation.entry(),
        refits=[{**dataclasses.asdict(one), "node": named.get(one.node, one.node)} for one in decision.refits],
        norms=[dataclasses.asdict(norm) for norm in decision.norms],
        refines=[dataclasses.asdict(entry) for entry in refines],
        methods={name: one.entry for name, one in applied.items()},
    )
    return make_report(job, sections)


def result_of_follower(prepared: Prepared, job: Job, decision: Decision) -> Result:
    """Return the result of a process that writes nothing: the narrowed model, marked as the written one is."""
    slim = narrowed(prepared, decision.ledger)
    mark(slim, job.recipe, held_out=job.held_out)
    told = report_of(prepared, job, decision, Made(slim=slim))
    return Result(report=told, output=None, model=loose(slim), gates_passed=True)


def _told(prepared: Prepared, verification: Verification | None, *, fitted: bool) -> Verification:
    """Add to a verification if a fit has seen the samples that judge; without checks, only the samples are named."""
    told = verification or Verification(judged=judged_by(prepared))
    judged = dict(told.judged or {})
    return dataclasses.replace(told, judged={**judged, "seen": fitted and judged["seen"]})


def _unlike(prepared: Prepared, verification: Verification | None) -> str:
    """Return a note on labels that were not used, not even by the user's own loss, or do not suit the data."""
    if verification is None or prepared.metric is not None:
        return ""
    return prepared.judges.unlike([(one["judged"], one["top1_reference"]) for one in verification.outputs])


def block_entry(
    block: Block,
    change: Change | None,
    axis_sizes: AxisSizes,
    stored: Mapping[str, Stored | LaidOut] | None = None,
    *,
    nodes: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the report's entry for a block.

    Args:
        block: the block.
        change: the decision; None if the block was not selected.
        axis_sizes: original shape of every weight that a slot names.
        stored: the weights among them that the file stores as integers with scales, or in a shape that it alone tells.
        nodes: names of the nodes that read its weights.

    Returns:
        The entry. `kept` counts units; `kept_units` lists them; `selector` is empty if no scores were needed. A
        member's `kept` lists the positions of the whole original axis that this block does not drop, including those
        that belong to other blocks or to none.
    """
    outcome = asdict(Outcome(status="skipped", reason="not selected") if change is None else change.outcome)
    narrowed = change is not None and change.outcome.status != "skipped"
    kept = change.reducer.kept if change is not None and narrowed else np.arange(block.units)
    cluster = change.reducer.cluster if change is not None and narrowed else None
    gone = np.setdiff1d(np.arange(block.units), kept)
    return {
        "name": block.name,
        "kind": block.kind,
        "units": block.units,
        "unit_size": block.unit_size,
        "span": list(block.span),
        "kept": len(kept),
        "kept_units": kept.tolist(),
        "selector": change.selector if change is not None and narrowed else "",
        "exact": True,  # narrowing it equals zeroing its consumers' dropped positions
        "nodes": list(nodes),
        "members": _members(block, gone, cluster, axis_sizes, stored or {}),
        "error": asdict(BlockError() if change is None else change.error),
        "outcome": outcome,
    }


def _members(
    block: Block, gone: Any, cluster: Any, axis_sizes: AxisSizes, otherwise: Mapping[str, Stored | LaidOut]
) -> list[dict[str, Any]]:
    """Return an entry per slot; a weight that the file stores otherwise is named by the arrays there."""
    found: list[dict[str, Any]] = []
    for slot in block.slots:
        common = {"cluster": None if cluster is None else cluster.tolist()}
        kept = _kept_positions(block.slots, slot, gone, axis_sizes)
        stored = otherwise.get(slot.initializer)
        parts = [(slot.initializer, slot.axis, kept)] if stored is None else stored.members(slot.axis, kept)
        for number, (name, axis, positions) in enumerate(parts):
            role = slot.role if number == 0 else "passenger"
            found.append({"initializer": name, "axis": axis, "role": role, "kept": positions.tolist(), **common})
    return found


def _kept_positions(slots: Sequence[Slot], slot: Slot, gone: Any, axis_sizes: AxisSizes) -> Ints:
    """Return the positions along the slot's axis that no slot of the block drops."""
    keep = np.ones(axis_sizes[slot.initializer][slot.axis], dtype=bool)
    for other in slots:
        if (other.param, other.axis) == (slot.param, slot.axis):
            keep[other.index[gone]] = False
    return np.flatnonzero(keep)
