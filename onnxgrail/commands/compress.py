"""Compress a model: `compress` runs all stages in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from onnxgrail import methods
from onnxgrail.calibration.prepare import check_data, prepare
from onnxgrail.calibration.runtime.custom import Libraries, files_of
from onnxgrail.calibration.runtime.threads import pinned
from onnxgrail.finishing import ship as shipping
from onnxgrail.finishing.empty import check_gain, nothing
from onnxgrail.finishing.finish import finished
from onnxgrail.graph.io.mapped import loose, unchanged
from onnxgrail.graph.io.model_file import external
from onnxgrail.job.opening import opened
from onnxgrail.job.places import places_of, reads, target_of, weights_of
from onnxgrail.job.resume import agree, bind, stats_files
from onnxgrail.machine.group.sums import SOLO, Group
from onnxgrail.machine.progress import Progress, silent
from onnxgrail.narrowing.decide import decided
from onnxgrail.recipe.check import recipe_of
from onnxgrail.recipe.choices import Choices
from onnxgrail.recipe.keywords import checked
from onnxgrail.report.build import report_of, result_of_follower
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
    metric: Any = None,
    group: Group = SOLO,
    progress: Progress = silent,
    **choices: Unpack[Choices],
) -> Result:
    """Write a smaller model whose outputs stay close to the original's.

    Args:
        model: path, bytes, onnx.ModelProto, onnx_ir.Model or onnx_graphsurgeon.Graph.
        output: file to write; for a model file it defaults to `IN.compressed.onnx` in the same folder, for other
            sources no file is written.
        data: calibration data (see `calibration.data.read`). `max_loss`, the default, needs them; with another amount
            None stands for random inputs, at a cost in fidelity.
        held_out: samples that are excluded from all fits and judge the result: a number of samples of `data`, or
            separate data; 0 for none. None holds out a fifth, 8 to 256 samples, if there are 32 or more.
        force: replace existing files: output, report, statistics and recipe. Input files are never replaced.
        dry_run: tell beforehand what a run takes, decide and report; write no model.
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
        metric: the loss that `max_loss` limits: a function, or `file.py:function`, which is run (docs/metric.md); None
            for the loss of the outputs' kinds.
        group: the processes that share the work, from `onnxgrail.join()`; all of them make this call, and all get the
            narrowed model, but only the first process refines, replaces layers, writes and checks.
        progress: called with stage, done, total.
        **choices: the fields of `Recipe`, for example `max_loss="2%", blocks=("mlp",)`. Without any amount
            (`max_loss`, `ratio`, `unit_ratio`, a target) `max_loss` is 1%.

    Returns:
        Result: the compressed model and its report.

    Raises:
        UsageError: a choice is unknown or out of range, or a loss is limited and there are no data.
        ModelError, DataError, OutputError: the input cannot be used or the output cannot be written.
        MissingExtraError: a refinement was requested and torch is not installed.
        NothingToCompressError: no block can lose a unit, or the file would not get smaller; its report says why.
        LostProcessError: another process of the group failed.
    """
    recipe, stored = recipe_of(choices), stats_files(stats, save_stats)
    methods.require(recipe)
    shipping.require(recipe)
    target = target_of(model, output) if group.rank == 0 else None
    places = places_of(
        None if dry_run else target,
        save_stats=save_stats,
        save_recipe=save_recipe,
        report=report,
        resume=resume,
        force=force,
    )
    if group.rank == 0:
        used = {"the statistics": stats, "the tokenizer": recipe.tokenizer, "an operator library": files_of(custom_ops)}
        used |= {"the metric": metric, "the ids of --keep-tokens": recipe.keep_tokens}
        places = places.reading(reads({"the input": model}, data, held_out, used))
    with opened(recipe, places, custom_ops=custom_ops, group=group, progress=progress) as begun:
        check_data(recipe, data)
        prepared = prepare(model, data, begun, held_out, metric)
        given = prepared.original
        apart = external(given, save_as_external_data)
        job = replace(begun, weights=weights_of(target, apart), held_out=held_out)
        with unchanged(given):
            agree(job.group, prepared)
            shipping.check(prepared, recipe)
            bind(job, prepared, stored, writes=places.beside())
            source, decision = decided(prepared, job, stored, curves, told=dry_run)
            if decision.is_empty and not (recipe.keeps_everything or source.trimmed or methods.beside(recipe)):
                raise nothing(source, decision, job, places)
            if not job.first:
                return result_of_follower(source, job, decision)
            (source, decision), worked, shipped = finished(prepared, (source, decision), job, latency=latency)
            check_gain(source, decision, shipped, job, places)
            with job.clock.stage("write"):
                written = places.write(shipped.model, job, apart=apart, sources=[given])
                left_out = places.save_recipe(recipe, data, held_out, metric)
    told = shipped.told(report_of(source, job, decision, shipped.made(worked, written)), left_out)
    places.save_report(told)
    return Result(report=told, output=places.output, model=loose(shipped.model), gates_passed=shipped.passes(recipe))
