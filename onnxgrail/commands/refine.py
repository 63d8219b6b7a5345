"""Fit a small model to the large model that it was made from: `onnxgrail refine`.

The function is not called `refine`: importing the package of that name would hide it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

import onnx_ir as ir

from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.prepare import prepare
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime.custom import Libraries, files_of
from onnxgrail.calibration.runtime.threads import pinned
from onnxgrail.commands.compare import counted_macs, same_inputs
from onnxgrail.core import Recipe
from onnxgrail.errors import ModelError, UsageError
from onnxgrail.finishing.verify import passes, verify
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io.interop import from_any
from onnxgrail.graph.io.mapped import unchanged, weight_files
from onnxgrail.graph.io.model_file import bytes_on_disk, external, load
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.rewrite.interface import between, fit
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.job.opening import opened
from onnxgrail.job.places import places_of, reads, target_of
from onnxgrail.job.resume import bind
from onnxgrail.machine.files.checksums import sha256
from onnxgrail.machine.files.paths import path_of
from onnxgrail.machine.job import Job
from onnxgrail.machine.plain import plain
from onnxgrail.machine.progress import Progress, silent
from onnxgrail.methods.refine.needed import require_torch
from onnxgrail.methods.refine.refinement import Refined
from onnxgrail.methods.refine.steps import refine_other
from onnxgrail.recipe.check import recipe_of
from onnxgrail.recipe.choices import RefineChoices
from onnxgrail.recipe.keywords import checked
from onnxgrail.recipe.storage import mark
from onnxgrail.report.build import make_report
from onnxgrail.report.environment import calibration_entry, environment
from onnxgrail.report.report import ModelChange, Report, Verification
from onnxgrail.report.result import Result

USED = frozenset(RefineChoices.__annotations__)
DEFAULT = ("laco", "distill")


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
        report: files for the report, as JSON.
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
    recipe = _recipe(choices)
    require_torch(recipe)
    target = None if dry_run else target_of(model, output, default_name)
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
            facts = _facts(prepared, small, recipe)
        bind(job, prepared, small=small, writes=places.beside())
        apart = external(small, save_as_external_data)
        first = {"params": counting.parameters(small), "macs": _macs(prepared, small, recipe), **_file(model, small)}
        sides: list[tuple[Verification | None, tuple[Any, ...]]] = [_checked(prepared, small, job)]
        with job.clock.stage("refine"):
            refined = refine_other(prepared.as_written(), job, small, facts)
        sides.append(_checked(prepared, small, job))
        mark(small, recipe, command="refine")
        with job.clock.stage("write"):
            written = places.write(small, job, apart=apart, sources=[prepared.model, small])
    change = _change(model, small, first, refined, written)
    told = _report(prepared, recipe, change, refined, [side[0] for side in sides], job)
    places.save_report(told)
    return Result(report=told, output=target, model=small, gates_passed=passes(sides[1][1], recipe))


def _recipe(choices: Mapping[str, Any]) -> Recipe:
    odd = sorted(n for n, value in choices.items() if value is not None and n not in USED)
    if odd:
        raise UsageError(f"refining has no option {odd[0]!r}", hint=f"Known options: {', '.join(sorted(USED))}")
    given = {"refine": DEFAULT, **{n: value for n, value in choices.items() if value is not None}}
    recipe = recipe_of({**given, "ratio": 0.0})
    if not recipe.refine:
        raise UsageError("no refinement is chosen", hint="Leave out --refine, or give it a kind")
    return recipe


def default_name(source: Path) -> Path:
    """Return `model.refined.onnx` next to `model.onnx`."""
    return source.with_name(f"{source.stem}.refined{source.suffix or '.onnx'}")


def _facts(prepared: Prepared, small: ir.Model, recipe: Recipe) -> Facts:
    """Run the small model once, check that its inputs and outputs match the reference, and return its facts.

    Raises:
        ModelError: they do not match.
    """
    same_inputs(signature_of(prepared.model), signature_of(small), "the small model")
    ports = between(prepared.model, small)
    facts, wide = observe(small, fit(prepared.feed, ports), providers=recipe.providers), prepared.survey.facts
    ours, theirs = ([v.name or "" for v in m.graph.outputs] for m in (small, prepared.model))
    common = [n for n in theirs if n in ours and wide.has_floats(n)]
    if not common:
        raise ModelError(
            f"the small model has the outputs {', '.join(ours)}, and the reference {', '.join(theirs)}",
            hint="Outputs are matched by name: rename them",
        )
    cut = {(p.name, p.axis): p.after for p in ports}
    for name in common:
        wanted = tuple(cut.get((name, axis), size) for axis, size in enumerate(wide.shapes[name]))
        if facts.shapes[name] != wanted:
            raise ModelError(
                f"output {name!r} of the small model has the shape {list(facts.shapes[name])}, and that of the "
                f"reference {list(wanted)}",
                hint="Only models with the same outputs can be fitted to each other",
            )
    return facts


def _macs(prepared: Prepared, small: ir.Model, recipe: Recipe) -> int | None:
    return counted_macs(small, fit(prepared.feed, between(prepared.model, small)), recipe.providers)


def _file(model: Any, small: ir.Model) -> dict[str, Any]:
    """Return the size and the checksums of the given model."""
    path = path_of(model)
    if path is not None:
        beside = {name: sha256(file) for name, file in weight_files(small).items()}
        return {"bytes": bytes_on_disk(small, path), "sha256": sha256(path), "data": beside}
    content = to_bytes(small, run=False)
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "data": {}}


def _checked(prepared: Prepared, small: ir.Model, job: Job) -> tuple[Verification | None, tuple[Any, ...]]:
    if not job.recipe.check:
        return None, ()
    with job.clock.stage("verify"):
        return verify(prepared, small, job)


def _change(
    model: Any, small: ir.Model, first: Mapping[str, Any], refined: Sequence[Refined], written: Mapping[Path, str]
) -> ModelChange:
    added = [entry.added for entry in refined if entry.added]
    macs, params = first["macs"], counting.parameters(small)
    target = next(iter(written), None)
    gone = 1 - params / first["params"] if first["params"] else 0.0
    return ModelChange(
        input=str(model) if isinstance(model, str | Path) else "model",
        output=None if target is None else str(target),
        sha256_before=first["sha256"],
        sha256_after=None if target is None else written[target],
        params_before=first["params"],
        params_after=params,
        macs_before=macs,
        macs_after=None if macs is None else macs + sum(one["macs"] for one in added),
        bytes_before=first["bytes"],
        bytes_after=sum(f.stat().st_size for f in written) if written else first["bytes"] + _bytes(added),
        asked_ratio=None,
        achieved_ratio=gone,
        ratio_of="model",
        ratio_total=first["params"],
        model_ratio=gone,
        sha256_data_before=first["data"],
        sha256_data_after={file.name: digest for file, digest in written.items() if file != target},
    )


def _bytes(added: Sequence[Mapping[str, Any]]) -> int:
    return sum(int(one["bytes"]) for one in added)


def _report(
    prepared: Prepared,
    recipe: Recipe,
    change: ModelChange,
    refined: Sequence[Refined],
    sides: Sequence[Verification | None],
    job: Job,
) -> Report:
    """Return a report in schema 1 without blocks, with the reference and the small model's fidelity before the fit."""
    before, after = sides
    said = (prepared.scarce(), *(() if prepared.held_out is None else prepared.held_out.batches.notes))
    report = make_report(
        recipe=recipe,
        environment=environment(providers=recipe.providers, threads=None),
        model=change,
        blocks=[],
        refusals=[],
        verification=after,
        calibration=calibration_entry(prepared.batches),
        timing=job.clock.seconds,
        refines=[dataclasses.asdict(entry) for entry in refined],
        notes=[note for note in said if note],
    )
    path = prepared.path
    reference = {
        "path": str(path or "model"),
        "sha256": None if path is None else sha256(path),
        "params": counting.parameters(prepared.model),
        "outputs_before": [] if before is None else plain(before.outputs),
        "held_out_before": plain(((before and before.held_out) or {}).get("outputs", ())),
    }
    return Report(data={**report.data, "reference": reference})
