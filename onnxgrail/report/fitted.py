"""Build the report of a fit of a given small model to a large one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.allocation.achieved import Share
from onnxgrail.calibration.matched import counted_macs
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Recipe
from onnxgrail.graph.cost import counting
from onnxgrail.machine.files.paths import path_of
from onnxgrail.machine.files.placing import sha256
from onnxgrail.machine.job import Job
from onnxgrail.machine.plain import plain
from onnxgrail.methods.refine.refinement import Refined
from onnxgrail.report.comparison import Weight
from onnxgrail.report.environment import calibration_entry
from onnxgrail.report.report import ModelChange, Report, Verification
from onnxgrail.report.sections import Sections, make_report
from onnxgrail.report.sizes import Files, change_of, files_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """The results of a fit.

    Attributes:
        before: the size of the small model before; files: that it was read from.
        refined: one entry per fit.
        written: checksums of the written files, the model first.
        unfitted, fitted: the checks of the small model before and after.
    """

    before: Weight
    files: Files
    refined: Sequence[Refined]
    written: Mapping[Path, str]
    unfitted: Verification | None
    fitted: Verification | None


def before_of(prepared: Prepared, model: Any, small: ir.Model, recipe: Recipe) -> tuple[Weight, Files]:
    """Return the size of the small model, which was loaded from `model` and which the fit changes in place."""
    name, files = str(model) if isinstance(model, str | Path) else "model", files_of(small, path_of(model))
    macs = counted_macs(small, prepared.fed_small(small), recipe.providers)
    return Weight(name, counting.parameters(small), macs, files.bytes), files


def report_of_fit(prepared: Prepared, job: Job, small: ir.Model, made: Fitted) -> Report:
    """Return a report in schema 1 without blocks, with the reference and the small model's fidelity before the fit."""
    said = (prepared.scarce(), *(() if prepared.held_out is None else prepared.held_out.batches.notes))
    sections = Sections(
        model=_change(small, made),
        verification=made.fitted,
        calibration=calibration_entry(prepared.batches),
        refines=[dataclasses.asdict(entry) for entry in made.refined],
        notes=said,
    )
    path, before = prepared.path, made.unfitted
    reference = {
        "path": str(path or "model"),
        "sha256": None if path is None else sha256(path),
        "params": counting.parameters(prepared.original),
        "outputs_before": [] if before is None else plain(before.outputs),
        "held_out_before": plain(((before and before.held_out) or {}).get("outputs", ())),
    }
    return Report(data={**make_report(job, sections).data, "reference": reference})


def _change(small: ir.Model, made: Fitted) -> ModelChange:
    before, written = made.before, made.written
    added = [entry.added for entry in made.refined if entry.added]
    params = counting.parameters(small)
    gone = 1 - params / before.params if before.params else 0.0
    grown = sum(int(one["bytes"]) for one in added)
    macs = None if before.macs is None else before.macs + sum(one["macs"] for one in added)
    size = sum(f.stat().st_size for f in written) if written else before.bytes + grown
    share = Share(of="model", asked=None, achieved=gone, total=before.params)
    return change_of(before, Weight("", params, macs, size), made.files, written, share=share)
