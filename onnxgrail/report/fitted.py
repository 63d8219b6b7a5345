"""Build the report of a fit of a given small model to a large one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.counted import counted_macs
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Recipe
from onnxgrail.graph.cost import counting
from onnxgrail.graph.rewrite.interface import between, fit
from onnxgrail.machine.files.checksums import sha256
from onnxgrail.machine.files.paths import path_of
from onnxgrail.machine.job import Job
from onnxgrail.machine.plain import plain
from onnxgrail.methods.refine.refinement import Refined
from onnxgrail.report.environment import calibration_entry
from onnxgrail.report.report import ModelChange, Report, Verification
from onnxgrail.report.sections import Sections, make_report
from onnxgrail.report.sizes import Files, files_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """The small model before the fit: its name, size and files; `macs` is None if they cannot be counted."""

    name: str
    params: int
    macs: int | None
    files: Files


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitted:
    """The results of a fit.

    Attributes:
        before: the small model before.
        refined: one entry per fit.
        written: checksums of the written files, the model first.
        unfitted, fitted: the checks of the small model before and after.
    """

    before: Before
    refined: Sequence[Refined]
    written: Mapping[Path, str]
    unfitted: Verification | None
    fitted: Verification | None


def before_of(prepared: Prepared, model: Any, small: ir.Model, recipe: Recipe) -> Before:
    """Return the sizes of the small model, which was loaded from `model` and which the fit changes in place."""
    feed = fit(prepared.feed, between(prepared.model, small))
    return Before(
        name=str(model) if isinstance(model, str | Path) else "model",
        params=counting.parameters(small),
        macs=counted_macs(small, feed, recipe.providers),
        files=files_of(small, path_of(model)),
    )


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
        "params": counting.parameters(prepared.model),
        "outputs_before": [] if before is None else plain(before.outputs),
        "held_out_before": plain(((before and before.held_out) or {}).get("outputs", ())),
    }
    return Report(data={**make_report(job, sections).data, "reference": reference})


def _change(small: ir.Model, made: Fitted) -> ModelChange:
    before, written = made.before, made.written
    added = [entry.added for entry in made.refined if entry.added]
    params, target = counting.parameters(small), next(iter(written), None)
    gone = 1 - params / before.params if before.params else 0.0
    grown = sum(int(one["bytes"]) for one in added)
    return ModelChange(
        input=before.name,
        output=None if target is None else str(target),
        sha256_before=before.files.sha256,
        sha256_after=None if target is None else written[target],
        params_before=before.params,
        params_after=params,
        macs_before=before.macs,
        macs_after=None if before.macs is None else before.macs + sum(one["macs"] for one in added),
        bytes_before=before.files.bytes,
        bytes_after=sum(f.stat().st_size for f in written) if written else before.files.bytes + grown,
        asked_ratio=None,
        achieved_ratio=gone,
        ratio_of="model",
        ratio_total=before.params,
        model_ratio=gone,
        sha256_data_before=before.files.data,
        sha256_data_after={file.name: digest for file, digest in written.items() if file != target},
    )
