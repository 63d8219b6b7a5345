"""Compress a model: `compress` runs all stages in order."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Unpack

from onnxgrail import methods
from onnxgrail.calibration.prepare import prepare
from onnxgrail.calibration.prepared import narrowed
from onnxgrail.calibration.runtime.custom import Libraries, files_of
from onnxgrail.calibration.runtime.threads import pinned
from onnxgrail.core import Recipe
from onnxgrail.finishing import ship as shipping
from onnxgrail.finishing.empty import check_size, nothing
from onnxgrail.finishing.ship import ship
from onnxgrail.finishing.verify import passes
from onnxgrail.graph.io.mapped import loose, unchanged
from onnxgrail.graph.io.model_file import external
from onnxgrail.job.opening import opened
from onnxgrail.job.places import Writes, reads, target_of, write, writes_of
from onnxgrail.job.resume import agree, bind, stats_files
from onnxgrail.machine.files.paths import default_output
from onnxgrail.machine.group.sums import SOLO, Group
from onnxgrail.machine.progress import Progress, silent
from onnxgrail.methods.refine.needed import require_torch
from onnxgrail.narrowing.decide import decide
from onnxgrail.recipe import storage
from onnxgrail.recipe.check import recipe_of
from onnxgrail.recipe.choices import Choices
from onnxgrail.recipe.keywords import checked
from onnxgrail.report.build import Made, report_of
from onnxgrail.report.report import Report
from onnxgrail.report.result import Result


@checked
@pinned()
def compress(
    model: Any,
    output: str | Path | None = None,
    *,
    data: Any = None,
    held_out: Any = None,
    force: bool = False,
    dry_run: bool = False,
    save_as_external_data: bool | None = None,
    stats: str | Path | None = None,
    save_stats: str | Path | None = None,
    resume: str | Path | None = None,
    save_recipe: str | Path | None = None,
    latency: bool = False,
    curves: bool | None = False,
    report: str | Path | Iterable[str | Path] = (),
    custom_ops: Libraries = (),
    group: Group = SOLO,
    progress: Progress = silent,
    **choices: Unpack[Choices],
) -> Result:
    """Write a smaller model whose outputs stay close to the original's.

    Args:
        model: path, bytes, onnx.ModelProto, onnx_ir.Model or onnx_graphsurgeon.Graph.
        output: file to write; for a model file it defaults to `IN.compressed.onnx` in the same folder, for other
            sources no file is written.
        data: calibration data (see `calibration.data.read`); random inputs if None, at a cost in fidelity.
        held_out: samples that are excluded from all fits and judge the result: a number of samples of `data`, or
            separate data; 0 for none. None holds out a fifth, 8 to 256 samples, if there are 32 or more.
        force: replace existing files: output, report, statistics and recipe. Input files are never replaced.
        dry_run: decide and report, write no model.
        save_as_external_data: weights in a file next to the model, or inside; None: as in the input.
            Over 2 GB they always are in a separate file.
        stats: a file that `save_stats` wrote for the same model and data; its statistics are not measured again.
        save_stats: file for the second moments of the original model's activations, which do not depend on ratio,
            selector and budget.
        resume: a folder for finished blocks; the same call with the same folder continues a killed run.
        save_recipe: file (.yaml or .json) for the choices of this call, for `apply`; it names data in its own folder.
        latency: measure the original and the result in turn, for the report.
        curves: also measure the error of every block alone at several widths, for the report; None: only if that takes
            little time.
        report: files for the report: pages if the suffix is .html, JSON if it is .json.
        custom_ops: libraries with operators that ONNX Runtime does not have; their code is executed.
        group: the processes that share the work, from `onnxgrail.join()`; all of them make this call, and all get the
            narrowed model, but only the first process refines, replaces layers, writes and checks.
        progress: called with stage, done, total.
        **choices: the fields of `Recipe`, for example `ratio=0.3, blocks=("mlp",), selector="wanda"`.

    Returns:
        Result: the compressed model and its report.

    Raises:
        UsageError: a choice is unknown or out of range.
        ModelError, DataError, OutputError: the input cannot be used or the output cannot be written.
        MissingExtraError: a refinement was requested and torch is not installed.
        NothingToCompressError: no block can lose a unit, or the file would not get smaller; its report says why.
        LostProcessError: another process of the group failed.
    """
    recipe, stored = recipe_of(choices), stats_files(stats, save_stats)
    _require(recipe, save_recipe)
    target = target_of(model, output, default_output) if group.rank == 0 and not dry_run else None
    writes = writes_of(target, save_stats=save_stats, save_recipe=save_recipe, report=report, resume=resume)
    used = {"the statistics": stats, "the tokenizer": recipe.tokenizer, "an operator library": files_of(custom_ops)}
    read = reads({"the input": model}, data, held_out, used) if group.rank == 0 else []
    with opened(recipe, writes, read, force=force, custom_ops=custom_ops, group=group, progress=progress) as job:
        source = prepare(model, data, job, held_out)
        with unchanged(source.model):
            agree(job.group, source)
            shipping.check(source.model, recipe)
            bind(job, source, stored, writes=writes.beside())
            decision = decide(source, job, stored, sensitivity=curves)
            if not decision.changes and not recipe.keeps_everything and not methods.beside(recipe):
                raise nothing(source, decision, job, writes.reports)
            with job.clock.stage("narrow"):
                slim = narrowed(source, decision.ledger)
            if not job.first:
                storage.mark(slim, recipe)  # the first process does the same to the model it writes
                told = report_of(source, job, decision, Made(slim=slim))
                return Result(report=told, output=None, model=loose(slim), gates_passed=True)
            worked = methods.apply(source, decision, slim, job)
            shipped = ship(source, slim, job, latency=latency)
            check_size(source, decision, shipped, job, writes.reports)
            with job.clock.stage("write"):
                apart = external(source.model, save_as_external_data)
                written = write(shipped.model, target, apart=apart, job=job, sources=[source.model])
                left_out = _save_recipe(writes, recipe, data, held_out)
    made = Made(
        slim=shipped.narrowed, final=shipped.model, written=written, verification=shipped.verification, worked=worked
    )
    told = shipped.told(report_of(source, job, decision, made), left_out)
    _hand_over(told, writes)
    good = passes(shipped.results, recipe) and shipped.gates_passed
    return Result(report=told, output=target, model=loose(shipped.model), gates_passed=good)


def _hand_over(report: Report, writes: Writes) -> None:
    """Write the report to all its files."""
    for path in writes.reports:
        report.save(path, force=True)  # existing files were checked before the work


def _require(recipe: Recipe, save_recipe: str | Path | None) -> None:
    """Check before any work that all needed packages are installed, and that the recipe file has a known suffix.

    Raises:
        MissingExtraError: a package is not installed.
        UsageError: the suffix of the recipe file is unknown.
    """
    require_torch(recipe)
    methods.require(recipe)
    shipping.require(recipe)
    if save_recipe is not None:
        storage.check_suffix(Path(save_recipe))


def _save_recipe(writes: Writes, recipe: Recipe, data: Any, held_out: Any) -> list[str]:
    """Write the recipe file if requested; return notes on the parts left out."""
    return [] if writes.recipe is None else storage.save(writes.recipe, recipe, data=data, held_out=held_out)
