"""The product: compress a model.  Read `compress` first; everything else in the project is called from here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import onnx
import onnx_ir as ir

from onnxgrail import interop, methods, saved, shipping
from onnxgrail.allocation.statistics import StatsFiles
from onnxgrail.calibration.lanes import solving_on
from onnxgrail.calibration.threads import pinned
from onnxgrail.choices import Choices
from onnxgrail.core import Applied, Recipe
from onnxgrail.decision import Decision, decide
from onnxgrail.errors import NothingToCompressError, UsageError
from onnxgrail.finish import passes, report_of
from onnxgrail.graph.mapped import loose, weight_files
from onnxgrail.graph.model_io import LIMIT, Finished, save, weight_bytes
from onnxgrail.journal import NO_JOURNAL, Folder, Journal
from onnxgrail.parallel import SOLO, Group
from onnxgrail.paths import check_input, check_output, default_output, path_of, weights_file
from onnxgrail.preparation import Clock, Prepared, narrowed, prepare
from onnxgrail.progress import Progress, silent
from onnxgrail.recipe import recipe_of
from onnxgrail.refine.needed import require_torch
from onnxgrail.report import Report
from onnxgrail.resume import agree, begin, replaceable
from onnxgrail.shipping import ship
from onnxgrail.summary import nothing_text

if TYPE_CHECKING:
    from onnxgrail.refine.job import Refined

Owned = Callable[[Path], bool]
"""Whether a file is this very run's and may be replaced."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Result:
    """What `compress` made.

    Attributes:
        report: everything done and left alone.
        output: the written file, None when none was asked for.
        model: the graph as it is written.
        gates_passed: whether `min_cosine` held; the file is written either way.
    """

    report: Report
    output: Path | None
    model: ir.Model
    gates_passed: bool

    def proto(self) -> onnx.ModelProto:
        """The model as a message, with all weights inside."""
        return interop.to_proto(self.model)

    def to_bytes(self) -> bytes:
        """The model as the bytes of a file."""
        return interop.to_bytes(self.model)

    def graphsurgeon(self) -> Any:
        """The model as an `onnx_graphsurgeon.Graph`."""
        return interop.to_graphsurgeon(self.model)


@pinned()
def compress(
    model: Any,
    output: str | Path | None = None,
    *,
    data: Any = None,
    held_out: Any = None,
    force: bool = False,
    dry_run: bool = False,
    save_as_external_data: bool = False,
    stats: str | Path | None = None,
    save_stats: str | Path | None = None,
    resume: str | Path | None = None,
    save_recipe: str | Path | None = None,
    latency: bool = False,
    curves: bool | None = False,
    plots: str | Path | None = None,
    group: Group = SOLO,
    progress: Progress = silent,
    **choices: Unpack[Choices],
) -> Result:
    """Write a smaller model whose outputs stay close to the original's.

    Args:
        model: path, bytes, onnx.ModelProto, onnx_ir.Model or onnx_graphsurgeon.Graph.
        output: file to write; beside a path it defaults to `IN.compressed.onnx`, for other sources nothing is written.
        data: calibration data (see `calibration.data.read`); drawn at random when None, at a cost in fidelity.
        held_out: samples that nothing is fitted to and that the result is judged on: so many of `data`, held back, or
            data of their own.
        force: replace an existing output.
        dry_run: decide and report, write nothing.
        save_as_external_data: weights in a file beside the model; automatic over 2 GB.
        stats: a file that `save_stats` wrote for the same model and data; what it holds is not measured again.
        save_stats: file for the second moments of the original model's activations, which depend on neither ratio,
            selector nor budget.
        resume: a folder that keeps finished blocks; the same call with the same folder goes on where a killed one was.
        save_recipe: file (.yaml or .json) for the choices, data and output of this call, for `apply`.
        latency: measure original and result in turn, for the report.
        curves: also measure the error of every block alone at several widths, for the report; None: where that takes
            little time.
        plots: folder for figures of the report, as PNG and SVG.
        group: the processes that share the work, from `onnxgrail.join()`; all of them make this call, and all get the
            narrowed model, but only the first one refines, replaces layers, writes and checks.
        progress: called with stage, done, total.
        **choices: the fields of `Recipe`, for example `ratio=0.3, blocks=("mlp",), selector="wanda"`.

    Raises:
        UsageError: a choice is unknown or out of range.
        ModelError, DataError, OutputError: the input cannot be used or the output not written.
        MissingExtraError: a refinement is asked for and torch is not installed.
        NothingToCompressError: no block can lose a unit; its report says why.
        LostProcessError: another process of the group failed.
    """
    recipe, clock = recipe_of(choices), Clock()
    _require(recipe, plots)
    first = group.rank == 0
    kept = nullcontext() if resume is None or not first else closing(Folder(Path(resume)))
    with kept as folder, solving_on(recipe.providers):
        owned = functools.partial(replaceable, folder)
        target = _target(model, output, force=force, owned=owned) if first and not dry_run else None
        files = _files(model, target, stats, save_stats, force=force or not first, owned=owned)
        if save_recipe is not None and first:
            _check_recipe_file(model, target, Path(save_recipe), force=force or resume is not None)
        prepared = prepare(model, data, recipe, clock, group, held_out)
        agree(group, prepared)
        shipping.check(prepared.model, recipe)
        external = target is not None and (save_as_external_data or weight_bytes(prepared.model) > LIMIT)
        if target is not None and external:
            _check_weights_file(prepared.model, target, force=force, owned=owned)
        if folder is not None:
            begin(folder, prepared, recipe, files)
            folder.about_to_write(*(path for path in (files.write,) if path is not None))
        if first and prepared.path is not None:
            prepared.checksums.begin(prepared.path, *weight_files(prepared.model).values())
        journal = folder or NO_JOURNAL
        decision = decide(prepared, recipe, clock, progress, files, journal=journal, group=group, sensitivity=curves)
        if not decision.changes and not recipe.keeps_everything and not methods.beside(recipe):
            raise _nothing(prepared, recipe, decision, clock)
        with clock.stage("narrow"):
            slim = narrowed(prepared, decision.ledger)
        refined, applied = (
            _worked_over(prepared, recipe, decision, slim, clock, progress, journal) if first else ((), {})
        )
        shipped = ship(prepared, slim, recipe, clock, progress, latency=latency) if first else None
        with clock.stage("write"):
            if target is not None and shipped is not None:
                finished = prepared.checksums.renamed
                write(shipped.model, target, external=external, folder=folder, finished=finished)
            if save_recipe is not None and first:
                places = {"data": _named(data), "held_out": _named(held_out), "output": _named(output)}
                saved.save(Path(save_recipe), recipe, **places)
    report = report_of(
        prepared,
        recipe,
        decision,
        slim=slim if shipped is None else shipped.narrowed,
        output=target,
        verification=None if shipped is None else shipped.verification,
        timing=clock.seconds,
        refines=refined,
        applied=applied,
        final=None if shipped is None else shipped.model,
    )
    if shipped is None:
        saved.mark(slim, recipe)  # as the first process did with what it wrote
        return Result(report=report, output=target, model=loose(slim), gates_passed=True)
    good = passes(shipped.results, recipe) and shipped.gates_passed
    report = shipped.told(report)
    if plots is not None:
        report.save_plots(plots)
    return Result(report=report, output=target, model=loose(shipped.model), gates_passed=good)


def _require(recipe: Recipe, plots: str | Path | None) -> None:
    """Whether all that was asked for is installed, and figures have a place, before any work."""
    require_torch(recipe)
    methods.require(recipe)
    shipping.require(recipe)
    if plots is not None:
        from onnxgrail import plots as drawing

        drawing.require()
        drawing.check(Path(plots))


def _worked_over(
    prepared: Prepared,
    recipe: Recipe,
    decision: Decision,
    slim: ir.Model,
    clock: Clock,
    progress: Progress,
    journal: Journal,
) -> tuple[tuple[Refined, ...], dict[str, Applied]]:
    """What refinements and methods beside narrowing do to the narrowed graph, in place."""
    refined: tuple[Refined, ...] = ()
    with clock.stage("methods"):
        applied = methods.further(prepared, recipe, decision.ledger, slim, progress, journal, last=False)
    if recipe.refine:
        from onnxgrail.refine.steps import refine  # slow to import

        with clock.stage("refine"):
            refined = refine(prepared, recipe, decision.ledger, decision.changes, slim, progress, journal)
    with clock.stage("methods"):
        applied |= methods.further(prepared, recipe, decision.ledger, slim, progress, journal, last=True)
    return refined, applied


def write(
    slim: ir.Model, target: Path, *, external: bool, folder: Folder | None, finished: Finished | None = None
) -> None:
    """Write the model; a run that may be killed keeps its draft in its folder."""
    if folder is None:
        save(slim, target, external=external, finished=finished)
        return
    folder.about_to_write(target, *([weights_file(target)] if external else []))
    save(slim, target, external=external, scratch=folder.scratch(target), finished=finished)
    folder.finish()


def _target(model: Any, output: str | Path | None, *, force: bool, owned: Owned) -> Path | None:
    """Where to write, checked before the work starts."""
    source = path_of(model)
    if source is not None:
        check_input(source)
    if output is None and source is None:
        return None
    target = Path(output) if output is not None else default_output(source or Path())
    check_output(source or Path(), target, force=force or owned(target))
    return target


def _files(
    model: Any,
    target: Path | None,
    stats: str | Path | None,
    save_stats: str | Path | None,
    *,
    force: bool,
    owned: Owned,
) -> StatsFiles:
    """Where statistics come from and go to, checked before the work starts."""
    if stats is not None and save_stats is not None:
        raise UsageError("--stats and --save-stats exclude each other", hint="Give one of them")
    if save_stats is not None:
        check_output(path_of(model) or Path(), Path(save_stats), force=force or owned(Path(save_stats)))
        if target is not None and target.resolve() == Path(save_stats).resolve():
            raise UsageError(f"--save-stats {str(save_stats)!r} is the output", hint="Choose another name")
    return StatsFiles(
        read=None if stats is None else Path(stats), write=None if save_stats is None else Path(save_stats)
    )


def _check_recipe_file(model: Any, target: Path | None, path: Path, *, force: bool) -> None:
    """A recipe must not be written over a model."""
    saved.check_suffix(path)
    check_output(path_of(model) or Path(), path, force=force)
    if target is not None and target.resolve() == path.resolve():
        raise UsageError(f"--save-recipe {str(path)!r} is the output", hint="Choose another name")


def _named(source: Any) -> str | None:
    """A place, or a number of samples, that a recipe can name."""
    return str(source) if isinstance(source, str | Path | int) else None


def _check_weights_file(model: ir.Model, target: Path, *, force: bool, owned: Owned) -> None:
    """The file beside the output that takes the weights must not be one of somebody else, least of all the input's."""
    stored = (value.const_value for value in model.graph.initializers.values())
    sources = {Path(tensor.path) for tensor in stored if isinstance(tensor, ir.ExternalTensor)}
    for source in sources or {Path()}:
        check_output(source, weights_file(target), force=force or owned(weights_file(target)))


def _nothing(prepared: Prepared, recipe: Recipe, decision: Decision, clock: Clock) -> NothingToCompressError:
    """The error for a run without any narrowed block, with its report."""
    found, chosen, hint = prepared.survey.blocks, decision.chosen, ""
    budget = decision.allocation.budget
    if chosen and budget is not None and budget.before <= budget.limit:
        text = (
            f"nothing could be compressed: {budget.target.option} {budget.target.text} allows {budget.limit:.6g} and "
            f"the model has {budget.before:.6g}"
        )
    elif chosen and not decision.refusals and recipe.ratio is not None:
        text = f"nothing could be compressed: ratio {recipe.ratio:g} removes no unit from any of {len(chosen)} blocks"
    elif found and not chosen:
        text = f"nothing could be compressed: none of the {len(found)} blocks is of the kinds and names asked for"
        hint = f"They are of kind {', '.join(dict.fromkeys(b.kind for b in found))}; `onnxgrail inspect` names them"
    else:
        text = nothing_text([*prepared.survey.refusals, *decision.refusals])
    report = report_of(prepared, recipe, decision, slim=None, output=None, verification=None, timing=clock.seconds)
    return NothingToCompressError(text, hint=hint, report=report)
