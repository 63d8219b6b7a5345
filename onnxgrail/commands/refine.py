"""Fit a small model to the large model that it was made from: `onnxgrail refine`.

The function is not called `refine`: importing the package of that name would hide it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from onnxgrail.calibration.matched import facts_of
from onnxgrail.calibration.prepare import prepare
from onnxgrail.calibration.runtime.custom import Libraries, files_of
from onnxgrail.calibration.runtime.threads import pinned
from onnxgrail.finishing.verify import passes, verified
from onnxgrail.graph.io.interop import from_any
from onnxgrail.graph.io.mapped import unchanged
from onnxgrail.graph.io.model_file import external, load
from onnxgrail.job.opening import opened
from onnxgrail.job.places import places_of, reads, target_of
from onnxgrail.job.resume import bind
from onnxgrail.machine.files.paths import default_output
from onnxgrail.machine.progress import Progress, silent
from onnxgrail.methods.refine.needed import recipe_of_fit
from onnxgrail.methods.refine.steps import refine_other
from onnxgrail.recipe.choices import RefineChoices
from onnxgrail.recipe.keywords import checked
from onnxgrail.recipe.storage import mark
from onnxgrail.report.fitted import Fitted, before_of, report_of_fit
from onnxgrail.report.result import Result


@checked
@pinned()
def refine_model(
    model: Any,
    output: str | Path | None = None,
    *,
    reference: Any,
    data: Any = None,
    held_out: Any = None,
    force: bool = False,
    dry_run: bool = False,
    save_as_external_data: bool | None = None,
    resume: str | Path | None = None,
    report: str | Path | Iterable[str | Path] = (),
    custom_ops: Libraries = (),
    progress: Progress = silent,
    **choices: Unpack[RefineChoices],
) -> Result:
    """Fit a small model to the outputs of a large one, and to the outputs of its blocks if they can be matched.

    Blocks are matched by name, or else in order if both models have the same number of blocks of the same shapes.

    Args:
        model: the small model: path, bytes, onnx.ModelProto, onnx_ir.Model or onnx_graphsurgeon.Graph.
        output: file to write; for a model file it defaults to `SMALL.refined.onnx` in the same folder, for other
            sources no file is written.
        reference: the large model, with the same inputs and outputs; never written.
        data: as for `compress`.
        held_out: as for `compress`.
        force: replace an existing output and report. Input files are never replaced.
        dry_run: fit and report, write no model.
        save_as_external_data: as for `compress`; the default follows the small model.
        resume: a folder for finished fits; the same call with the same folder continues a killed run.
        report: files for the report, `.json` or `.html`.
        custom_ops: as for `compress`.
        progress: called with stage, done, total.
        **choices: `refine` (default laco, then distill) and the other fields of `Recipe` on data and fits.

    Returns:
        Result: the fitted model and its report.

    Raises:
        UsageError: a choice is unknown, out of range or not applicable.
        ModelError: a model cannot be read or run, or the two differ in inputs or outputs.
        DataError, OutputError: the data do not fit, or the output cannot be written.
        MissingExtraError: torch is not installed.
    """
    recipe = recipe_of_fit(choices)
    target = None if dry_run else target_of(model, output, partial(default_output, word="refined"))
    places = places_of(target, report=report, resume=resume, force=force)
    models = {"the input": model, "the reference": reference}
    used = {"the tokenizer": recipe.tokenizer, "an operator library": files_of(custom_ops)}
    places = places.reading(reads(models, data, held_out, used))
    with (
        opened(recipe, places, custom_ops=custom_ops, progress=progress) as job,
        ExitStack() as stack,
    ):
        prepared = prepare(reference, data, job, held_out)
        with job.clock.stage("load"):
            small = load(from_any(model))
            for source in (prepared.model, small):
                stack.enter_context(unchanged(source))
            facts = facts_of(prepared, small, recipe.providers)
        bind(job, prepared, small=small, writes=places.beside())
        apart = external(small, save_as_external_data)
        before, files = before_of(prepared, model, small, recipe)
        unfitted, _ = verified(prepared, small, job)
        with job.clock.stage("refine"):
            refined = refine_other(prepared.as_written(), job, small, facts)
        fitted, results = verified(prepared, small, job)
        mark(small, recipe, command="refine")
        with job.clock.stage("write"):
            written = places.write(small, job, apart=apart, sources=[prepared.model, small])
    made = Fitted(before=before, files=files, refined=refined, written=written, unfitted=unfitted, fitted=fitted)
    told = report_of_fit(prepared, job, small, made)
    places.save_report(told)
    return Result(report=told, output=target, model=small, gates_passed=passes(results, recipe))
