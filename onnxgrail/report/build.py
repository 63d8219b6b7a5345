"""Build the report of a compression from the results of all stages."""

from __future__ import annotations

import dataclasses
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.prepared import Prepared, judged_by
from onnxgrail.graph.cuts.places import located, nodes_of
from onnxgrail.graph.io.mapped import loose
from onnxgrail.graph.rewrite.interface import between
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.decide import Decision
from onnxgrail.recipe.storage import mark
from onnxgrail.report.blocks import block_entry
from onnxgrail.report.environment import calibration_entry
from onnxgrail.report.made import Made
from onnxgrail.report.notes import notes_of
from onnxgrail.report.report import Report, Verification
from onnxgrail.report.result import Result
from onnxgrail.report.sections import Sections, make_report
from onnxgrail.report.sizes import sizes_of


def report_of(prepared: Prepared, job: Job, decision: Decision, made: Made) -> Report:
    """Return the report of a run in schema 1: all decisions, results and refusals."""
    recipe, refines, applied = job.recipe, made.worked.refined, made.worked.applied
    decided = {c.block.name: c for c in decision.changes}
    sizes = sizes_of(prepared, recipe, decision, made)
    survey = prepared.shown
    refusals = survey.refusals if "grail" in recipe.method else ()  # why blocks stay, where any were to be narrowed
    ports = () if made.slim is None else between(prepared.model, made.slim)
    calibration = _calibration(prepared.batches, decision, used=bool(applied))
    sections = Sections(
        model=sizes,
        blocks=[
            block_entry(b, decided.get(b.name), survey.facts.shapes, survey.facts.stored, nodes=nodes)
            for b, nodes in zip(survey.blocks, nodes_of(prepared.model, survey.blocks), strict=True)
        ],
        refusals=located(
            prepared.model, [*refusals, *decision.refusals, *(r for one in applied.values() for r in one.refusals)]
        ),
        verification=_told(prepared, made.verification, fitted=calibration is not None),
        calibration=calibration,
        interface=ports,
        tables=[dataclasses.asdict(table) for table in prepared.trimmed],
        notes=[
            prepared.scarce() if calibration else "",
            *notes_of(prepared, recipe, decision, sizes.budget, ports, made.slim),
            *(note for one in applied.values() for note in one.notes),
            *(() if prepared.held_out is None else prepared.held_out.batches.notes),
        ],
        allocation=decision.allocation.entry(),
        refits=[dataclasses.asdict(refit) for refit in decision.refits],
        norms=[dataclasses.asdict(norm) for norm in decision.norms],
        refines=[dataclasses.asdict(entry) for entry in refines],
        methods={name: one.entry for name, one in applied.items()},
    )
    return make_report(job, sections)


def result_of_follower(prepared: Prepared, job: Job, decision: Decision, slim: ir.Model) -> Result:
    """Return the result of a process that writes nothing: the narrowed model, marked as the written one is."""
    mark(slim, job.recipe)
    told = report_of(prepared, job, decision, Made(slim=slim))
    return Result(report=told, output=None, model=loose(slim), gates_passed=True)


def _told(prepared: Prepared, verification: Verification | None, *, fitted: bool) -> Verification:
    """Add to a verification if a fit has seen the samples that judge; without checks, only the samples are named."""
    told = verification or Verification(judged=judged_by(prepared))
    judged = dict(told.judged or {})
    return dataclasses.replace(told, judged={**judged, "seen": fitted and judged.get("on") == "calibration"})


def _calibration(batches: Batches, decision: Decision, *, used: bool) -> dict[str, Any] | None:
    if not used and not decision.norms and not any(c.error.plain is not None for c in decision.changes):
        return None  # nothing was measured: the data were not used
    return calibration_entry(batches)
