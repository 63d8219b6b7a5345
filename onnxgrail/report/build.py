"""Build the report of a compression from the results of all stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.prepared import Prepared, judged_by
from onnxgrail.core import Applied, Recipe, Refusal
from onnxgrail.graph.cuts.places import located
from onnxgrail.graph.io.mapped import loose
from onnxgrail.graph.rewrite.interface import Port, changed
from onnxgrail.machine.job import Job
from onnxgrail.machine.memory import peak_rss_bytes
from onnxgrail.machine.plain import SCHEMA, plain
from onnxgrail.methods import Worked
from onnxgrail.narrowing.decide import Decision
from onnxgrail.recipe.storage import mark
from onnxgrail.report.blocks import block_entry
from onnxgrail.report.environment import calibration_entry, environment, version_of
from onnxgrail.report.notes import notes_of
from onnxgrail.report.report import ModelChange, Report, Verification
from onnxgrail.report.result import Result
from onnxgrail.report.sizes import grown, share_of, sizes_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Made:
    """The results of the stages after the decision.

    Attributes:
        slim: the narrowed graph; None if nothing was narrowed.
        final: the graph as it is written, if it differs from `slim`.
        written: checksums of the written files, the model first.
        verification: the checks of the result.
        worked: results of refinements and further methods.
    """

    slim: ir.Model | None = None
    final: ir.Model | None = None
    written: Mapping[Path, str] = field(default_factory=dict)
    verification: Verification | None = None
    worked: Worked = field(default_factory=Worked)


def report_of(prepared: Prepared, job: Job, decision: Decision, made: Made) -> Report:
    """Return the report of a run in schema 1: all decisions, results and refusals."""
    recipe, slim, refines, applied = job.recipe, made.slim, made.worked.refined, made.worked.applied
    decided = {c.block.name: c for c in decision.changes}
    added = tuple(Applied(entry={}, macs=-macs * prepared.samples, bytes=-size) for macs, size in grown(refines))
    share = share_of(prepared, recipe, decision, applied)
    sizes = sizes_of(prepared, share, decision, slim, made.written, (*applied.values(), *added), made.final or slim)
    survey = prepared.survey
    refusals = survey.refusals if "grail" in recipe.method else ()  # why blocks stay, where any were to be narrowed
    ports = changed(prepared.model, survey, decision.ledger.dead)
    calibration = _calibration(prepared.batches, decision, used=bool(applied))
    return make_report(
        recipe=recipe,
        environment=environment(providers=recipe.providers, threads=None),
        model=sizes,
        blocks=[block_entry(b, decided.get(b.name), survey.facts.shapes, survey.facts.stored) for b in survey.blocks],
        refusals=located(
            prepared.model, [*refusals, *decision.refusals, *(r for one in applied.values() for r in one.refusals)]
        ),
        verification=_told(prepared, made.verification, fitted=calibration is not None),
        calibration=calibration,
        timing=job.clock.seconds,
        interface=ports,
        notes=[
            prepared.scarce() if calibration else "",
            *notes_of(prepared, recipe, decision, sizes.budget, ports, slim),
            *(note for one in applied.values() for note in one.notes),
            *(() if prepared.held_out is None else prepared.held_out.batches.notes),
        ],
        allocation=decision.allocation.entry(),
        refits=[dataclasses.asdict(refit) for refit in decision.refits],
        norms=[dataclasses.asdict(norm) for norm in decision.norms],
        refines=[dataclasses.asdict(entry) for entry in refines],
        methods={name: one.entry for name, one in applied.items()},
    )


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


def make_report(
    *,
    recipe: Recipe,
    environment: Mapping[str, Any],
    model: ModelChange,
    blocks: Sequence[Mapping[str, Any]],
    refusals: Iterable[Refusal],
    verification: Verification | None = None,
    calibration: Mapping[str, Any] | None = None,
    timing: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
    interface: Sequence[Port] = (),
    allocation: Mapping[str, Any] | None = None,
    refits: Sequence[Mapping[str, Any]] = (),
    norms: Sequence[Mapping[str, Any]] = (),
    refines: Sequence[Mapping[str, Any]] = (),
    methods: Mapping[str, Mapping[str, Any]] | None = None,
) -> Report:
    """Assemble a report.

    Args:
        recipe: the user's choices.
        environment: from `environment()`.
        model: before and after.
        blocks: from `block_entry`.
        refusals: the channels that were left alone.
        verification: the checks of the result.
        calibration: from `calibration_entry`.
        timing: seconds per stage; `forward` is the time spent inside ONNX Runtime.
        notes: messages for the user.
        interface: inputs and outputs whose shapes changed.
        allocation: the choice of widths over the blocks, and the cost of rounding them.
        refits: layers fitted to the original network, with errors on held-out rows.
        norms: normalizations fitted to the original's activations.
        refines: fits by gradient, block by block or of the whole model.
        methods: results of methods other than narrowing, by name.
    """
    return Report(
        data={
            "schema": SCHEMA,
            "tool": {"name": "onnxgrail", "version": version_of("onnxgrail")},
            "recipe": plain(asdict(recipe)),
            "environment": plain(environment),
            "model": asdict(model),
            "calibration": plain(calibration),
            "allocation": plain(allocation),
            "blocks": [plain(block) for block in blocks],
            "refits": plain(list(refits)),
            "norms": plain(list(norms)),
            "refines": plain(list(refines)),
            "methods": plain(methods or {}),
            "refusals": [asdict(refusal) for refusal in refusals],
            "verification": plain(asdict(verification or Verification())),
            "interface": plain([asdict(port) for port in interface]),
            "timing": {stage: round(seconds, 4) for stage, seconds in (timing or {}).items()},
            "peak_rss_bytes": peak_rss_bytes(),
            "notes": [note for note in notes if note],
        }
    )
