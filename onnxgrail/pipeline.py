"""The product: compress a model.  Read `compress` first; everything else in the project is called from here."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import onnx
import onnx_ir as ir

from onnxgrail import interop, methods, saved, shipping
from onnxgrail.allocation.statistics import StatsFiles
from onnxgrail.calibration.custom import Libraries, files_of
from onnxgrail.calibration.custom import custom_ops as registered
from onnxgrail.calibration.lanes import solving_on
from onnxgrail.calibration.threads import pinned
from onnxgrail.choices import Choices
from onnxgrail.core import Applied, Recipe
from onnxgrail.decision import Decision, decide
from onnxgrail.errors import NothingToCompressError, UsageError
from onnxgrail.files import Writes, reads, target_of, writes_of
from onnxgrail.finish import passes
from onnxgrail.graph.mapped import check_unchanged, loose, unchanged
from onnxgrail.graph.model_io import external, save
from onnxgrail.journal import NO_JOURNAL, Folder, Journal
from onnxgrail.keywords import checked
from onnxgrail.parallel import SOLO, Group
from onnxgrail.paths import default_output, path_of
from onnxgrail.preparation import Clock, Prepared, narrowed, prepare
from onnxgrail.progress import Progress, silent
from onnxgrail.recipe import recipe_of
from onnxgrail.refine.needed import require_torch
from onnxgrail.report import Report
from onnxgrail.report_build import report_of
from onnxgrail.resume import agree, begin, replaceable
from onnxgrail.shipping import outgrown, ship
from onnxgrail.summary import nothing_text

if TYPE_CHECKING:
    from onnxgrail.refine.job import Refined


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        return "\n".join([str(self.report), self._written])

    def _repr_html_(self) -> str:
        from onnxgrail.page.markup import el

        return self.report._repr_html_() + el("p", self._written)

    @property
    def _written(self) -> str:
        return f"Written: {self.output}" if self.output is not None else "No model was written"

    def proto(self) -> onnx.ModelProto:
        """The model as a message, with all weights inside."""
        return interop.to_proto(self.model)

    def to_bytes(self) -> bytes:
        """The model as the bytes of a file."""
        return interop.to_bytes(self.model)

    def graphsurgeon(self) -> Any:
        """The model as an `onnx_graphsurgeon.Graph`."""
        return interop.to_graphsurgeon(self.model)


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
        output: file to write; beside a path it defaults to `IN.compressed.onnx`, for other sources nothing is written.
        data: calibration data (see `calibration.data.read`); drawn at random when None, at a cost in fidelity.
        held_out: samples that nothing is fitted to and that the result is judged on: so many of `data`, held back, or
            data of their own; 0 for none. None holds a fifth back, 8 to 256 samples, where there are 32 or more.
        force: replace files that exist: the output, its report, figures, statistics and recipe. What is read never is.
        dry_run: decide and report, write nothing.
        save_as_external_data: weights in a file beside the model, or inside; None: as the input has them.
            Over 2 GB they always are beside it.
        stats: a file that `save_stats` wrote for the same model and data; what it holds is not measured again.
        save_stats: file for the second moments of the original model's activations, which depend on neither ratio,
            selector nor budget.
        resume: a folder that keeps finished blocks; the same call with the same folder goes on where a killed one was.
        save_recipe: file (.yaml or .json) for the choices of this call, for `apply`; it names data beside itself.
        latency: measure original and result in turn, for the report.
        curves: also measure the error of every block alone at several widths, for the report; None: where that takes
            little time.
        report: files for the report: pages where the suffix is .html, JSON where it is .json.
        custom_ops: libraries with operators that ONNX Runtime does not have; the code in them is run.
        group: the processes that share the work, from `onnxgrail.join()`; all of them make this call, and all get the
            narrowed model, but only the first one refines, replaces layers, writes and checks.
        progress: called with stage, done, total.
        **choices: the fields of `Recipe`, for example `ratio=0.3, blocks=("mlp",), selector="wanda"`.

    Raises:
        UsageError: a choice is unknown or out of range.
        ModelError, DataError, OutputError: the input cannot be used or the output not written.
        MissingExtraError: a refinement is asked for and torch is not installed.
        NothingToCompressError: no block can lose a unit, or the file would not get smaller; its report says why.
        LostProcessError: another process of the group failed.
    """
    recipe, clock = recipe_of(choices), Clock(progress)
    _require(recipe, save_recipe)
    first = group.rank == 0
    stored = _files(stats, save_stats)
    target = target_of(model, output, default_output) if first and not dry_run else None
    writes = writes_of(target, save_stats=save_stats, save_recipe=save_recipe, report=report, resume=resume)
    if first:
        used = {"the statistics": stats, "the tokenizer": recipe.tokenizer, "an operator library": files_of(custom_ops)}
        writes.apart(reads({"the input": model}, data, held_out, used))
    kept = nullcontext() if resume is None or not first else closing(Folder(Path(resume)))
    with kept as folder, registered(custom_ops), solving_on(recipe.providers), ExitStack() as stack:
        if first:
            writes.ready(force=force, owned=functools.partial(replaceable, folder))
        prepared = prepare(model, data, recipe, clock, group, held_out)
        stack.enter_context(unchanged(prepared.model))
        agree(group, prepared)
        shipping.check(prepared.model, recipe)
        if folder is not None:
            begin(folder, prepared, recipe, stored, writes=writes.beside())
        journal = folder or NO_JOURNAL
        decision = decide(prepared, recipe, clock, progress, stored, journal=journal, group=group, sensitivity=curves)
        if not decision.changes and not recipe.keeps_everything and not methods.beside(recipe):
            raise _nothing(prepared, recipe, decision, clock, writes.reports if first else ())
        with clock.stage("narrow"):
            slim = narrowed(prepared, decision.ledger)
        refined, applied = (
            _worked_over(prepared, recipe, decision, slim, clock, progress, journal) if first else ((), {})
        )
        shipped = ship(prepared, slim, recipe, clock, progress, latency=latency) if first else None
        _check_size(prepared, recipe, decision, clock, writes.reports, shipped)
        written: dict[Path, str] = {}
        with clock.stage("write"):
            if target is not None and shipped is not None:
                written = write(
                    shipped.model,
                    target,
                    apart=external(prepared.model, save_as_external_data),
                    folder=folder,
                    sources=[prepared.model],
                )
            elif first:
                check_unchanged(prepared.model)
            given = {"data": data, "held_out": held_out}
            left_out = saved.save(writes.recipe, recipe, **given) if writes.recipe is not None and first else []
    told = report_of(
        prepared,
        recipe,
        decision,
        slim=slim if shipped is None else shipped.narrowed,
        written=written,
        verification=None if shipped is None else shipped.verification,
        timing=clock.seconds,
        refines=refined,
        applied=applied,
        final=None if shipped is None else shipped.model,
    )
    if shipped is None:
        saved.mark(slim, recipe)  # as the first process did with what it wrote
        return Result(report=told, output=target, model=loose(slim), gates_passed=True)
    good = passes(shipped.results, recipe) and shipped.gates_passed
    told = shipped.told(told, left_out)
    _hand_over(told, writes)
    return Result(report=told, output=target, model=loose(shipped.model), gates_passed=good)


def _hand_over(report: Report, writes: Writes) -> None:
    """Write the report."""
    for path in writes.reports:
        report.save(path, force=True)  # what is there was looked at before the work


def _require(recipe: Recipe, save_recipe: str | Path | None) -> None:
    """Whether all that was asked for is installed, and a recipe has a known form, before any work."""
    require_torch(recipe)
    methods.require(recipe)
    shipping.require(recipe)
    if save_recipe is not None:
        saved.check_suffix(Path(save_recipe))


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
    prepared = prepared.as_written()
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
    slim: ir.Model, target: Path, *, apart: bool, folder: Folder | None, sources: Iterable[ir.Model]
) -> dict[Path, str]:
    """Write the model; a run that may be killed keeps its draft in its folder.

    `sources` are as for `save`, and so is what it returns.
    """
    if folder is None:
        return save(slim, target, apart=apart, sources=sources)
    folder.about_to_write(target)
    written = save(slim, target, apart=apart, scratch=folder.scratch(target), sources=sources)
    folder.finish()
    return written


def _files(stats: str | Path | None, save_stats: str | Path | None) -> StatsFiles:
    """Where statistics come from and go to."""
    if stats is not None and save_stats is not None:
        raise UsageError("--stats and --save-stats exclude each other", hint="Give one of them")
    return StatsFiles(read=path_of(stats), write=path_of(save_stats))


def _nothing(
    prepared: Prepared, recipe: Recipe, decision: Decision, clock: Clock, reports: Sequence[Path]
) -> NothingToCompressError:
    """The error for a run without any narrowed block."""
    found, chosen, hint = prepared.survey.blocks, decision.chosen, ""
    budget = decision.allocation.budget
    if chosen and budget is not None and budget.before <= budget.limit:
        text = (
            f"nothing could be compressed: {budget.target.option} {budget.target.text} allows {budget.limit:.6g} and "
            f"the model has {budget.before:.6g}"
        )
    elif chosen and not decision.refusals and budget is None:
        asked = f"ratio {recipe.ratio:g}" if recipe.unit_ratio is None else f"unit ratio {recipe.unit_ratio:g}"
        text = f"nothing could be compressed: {asked} removes no unit from any of {len(chosen)} blocks"
    elif found and not chosen:
        text = f"nothing could be compressed: none of the {len(found)} blocks is of the kinds and names asked for"
        hint = f"They are of kind {', '.join(dict.fromkeys(b.kind for b in found))}; `onnxgrail inspect` names them"
    else:
        text = nothing_text([*prepared.survey.refusals, *decision.refusals])
    return _refused(prepared, recipe, decision, clock, reports, text, hint)


def _check_size(
    prepared: Prepared,
    recipe: Recipe,
    decision: Decision,
    clock: Clock,
    reports: Sequence[Path],
    shipped: shipping.Shipped | None,
) -> None:
    """Refuse a result that is larger than the input.

    Raises:
        NothingToCompressError: it is.
    """
    grown = None if shipped is None else outgrown(prepared, shipped.model, recipe)
    if grown is not None:
        raise _refused(prepared, recipe, decision, clock, reports, *grown)


def _refused(
    prepared: Prepared,
    recipe: Recipe,
    decision: Decision,
    clock: Clock,
    reports: Sequence[Path],
    text: str,
    hint: str,
) -> NothingToCompressError:
    """The error for a run without a result, with its report, which is also written."""
    report = report_of(prepared, recipe, decision, slim=None, written={}, verification=None, timing=clock.seconds)
    for path in reports:
        report.save(path, force=True)
    return NothingToCompressError(text, hint=hint, report=report)
