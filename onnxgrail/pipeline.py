"""The product: compress a model.  Read `compress` first; everything else in the project is called from here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail import plan
from onnxgrail.algebra.compensate import COMPENSATORS, Compensator
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.selectors import SELECTORS
from onnxgrail.calibration.proof import prove
from onnxgrail.calibration.stream import Stream
from onnxgrail.core import Block, Change, Progress, Recipe, Refusal, Stats, View, silent
from onnxgrail.errors import NothingToCompressError
from onnxgrail.fidelity import Fidelity
from onnxgrail.finish import narrowed, passes, report_of, verify
from onnxgrail.graph import weights
from onnxgrail.graph.model_io import save
from onnxgrail.graph.survey import Ledger
from onnxgrail.methods.grail import reduce_and_compensate
from onnxgrail.order import steps
from onnxgrail.paths import check_input, check_output, default_output
from onnxgrail.preparation import Clock, Prepared, prepare
from onnxgrail.recipe import recipe_of
from onnxgrail.report import Report, Verification, nothing_text


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Result:
    """What `compress` made.

    Attributes:
        report: everything done and left alone.
        output: the written file, None when none was asked for.
        model: the narrowed graph.
        gates_passed: whether `min_cosine` held; the file is written either way.
    """

    report: Report
    output: Path | None
    model: ir.Model
    gates_passed: bool


def compress(
    model: Any,
    output: str | Path | None = None,
    *,
    data: Any = None,
    force: bool = False,
    dry_run: bool = False,
    save_as_external_data: bool = False,
    progress: Progress = silent,
    **choices: Any,
) -> Result:
    """Write a smaller model whose outputs stay close to the original's.

    Args:
        model: path, bytes, onnx.ModelProto, onnx_ir.Model or onnx_graphsurgeon.Graph.
        output: file to write; beside a path it defaults to `IN.compressed.onnx`, for other sources nothing is written.
        data: calibration data (see `calibration.data.read`); drawn at random when None, at a cost in fidelity.
        force: replace an existing output.
        dry_run: decide and report, write nothing.
        save_as_external_data: weights in a file beside the model; automatic over 2 GB.
        progress: called with stage, done, total.
        **choices: the fields of `Recipe`, for example `ratio=0.3, blocks=("mlp",), selector="wanda"`.

    Raises:
        UsageError: a choice is unknown or out of range.
        ModelError, DataError, OutputError: the input cannot be used or the output not written.
        NothingToCompressError: no block can lose a unit; its report says why.
    """
    recipe, clock = recipe_of(choices), Clock()
    target = _target(model, output, force=force, dry_run=dry_run)
    prepared = prepare(model, data, recipe, clock)
    ledger, changes, refusals = decide(prepared, recipe, clock, progress)
    with clock.stage("write"):
        slim = narrowed(prepared, ledger)
        if target is not None:
            save(slim, target, external=save_as_external_data)
    verification: Verification | None = None
    results: tuple[Fidelity, ...] = ()
    if recipe.check:
        with clock.stage("verify"):
            verification, results = verify(prepared, slim, target, recipe, progress)
    report = report_of(
        prepared,
        recipe,
        changes=changes,
        refusals=refusals,
        ledger=ledger,
        slim=slim,
        output=target,
        verification=verification,
        clock=clock,
    )
    return Result(report=report, output=target, model=slim, gates_passed=passes(results, recipe))


def _target(model: Any, output: str | Path | None, *, force: bool, dry_run: bool) -> Path | None:
    """Where to write, checked before the work starts."""
    source = Path(model) if isinstance(model, str | Path) else None
    if source is not None:
        check_input(source)
    if output is None and source is None:
        return None
    target = Path(output) if output is not None else default_output(source or Path())
    if dry_run:
        return None
    check_output(source or Path(), target, force=force)
    return target


def decide(
    prepared: Prepared, recipe: Recipe, clock: Clock, progress: Progress
) -> tuple[Ledger, list[Change], tuple[Refusal, ...]]:
    """Choose widths, prove that they narrow exactly, then calibrate and compensate block by block.

    Raises:
        NothingToCompressError: no block can lose a unit.
    """
    chosen = plan.selected(prepared.survey.blocks, recipe)
    kept = plan.widths(chosen, recipe)
    candidates = tuple(b for b in chosen if kept[b.name] < b.units)
    refused: tuple[Refusal, ...] = ()
    with clock.stage("prove"):
        if candidates:
            candidates, refused = prove(
                prepared.model,
                prepared.survey,
                candidates,
                kept,
                prepared.feed,
                providers=recipe.providers,
                folder=prepared.folder,
            )
    if not candidates and recipe.ratio > 0:
        raise _nothing(prepared, recipe, chosen, refused, clock)
    with clock.stage("calibrate"):
        ledger, changes, clock.seconds["forward"] = _calibrated(prepared, candidates, kept, recipe, progress)
    return ledger, changes, refused


def _calibrated(
    prepared: Prepared, blocks: Sequence[Block], kept: Mapping[str, int], recipe: Recipe, progress: Progress
) -> tuple[Ledger, list[Change], float]:
    """One decision after the other; in closed loop each sees the network as decided so far.

    The last item is the time spent inside ONNX Runtime, in seconds.
    """
    model, survey = prepared.model, prepared.survey
    ledger = weights.empty(survey)
    changes: list[Change] = []

    def settle(block: Block, stats: tuple[Stats, ...]) -> None:
        nonlocal ledger
        view = View(block=block, weights=weights.read(block, model, survey, ledger), stats=stats)
        change = reduce_and_compensate(
            view,
            kept[block.name],
            selector=SELECTORS[recipe.selector],
            reducer=REDUCERS[recipe.reducer],
            compensator=_compensator(recipe),
            rng=np.random.default_rng((recipe.seed, int(block.ids[0]))),
        )
        changes.append(change)
        ledger = weights.record(change, model, survey, ledger)

    if not _needs_data(recipe):
        for block in blocks:
            settle(block, ())
        return ledger, changes, 0.0
    todo = steps(blocks, closed_loop=recipe.closed_loop)
    total, done = len(prepared.batches) * len(todo), 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress("calibrating", done, total)

    with Stream(model, survey, prepared.batches, providers=recipe.providers, folder=prepared.folder) as stream:
        for step in todo:
            stream.advance(ledger, step.limit)
            found = iter(stream.measure([p for b in step.blocks for p in b.probes], ledger, tick))
            measured = [tuple(next(found) for _ in b.probes) for b in step.blocks]
            for block, stats in zip(step.blocks, measured, strict=True):
                settle(block, stats)
    return ledger, changes, stream.forward


def _compensator(recipe: Recipe) -> Compensator:
    """The chosen compensator with the recipe's ridge."""
    chosen: Any = COMPENSATORS[recipe.compensate]
    fields = {f.name for f in dataclasses.fields(chosen)}
    compensator: Compensator = dataclasses.replace(chosen, alpha=recipe.ridge) if "alpha" in fields else chosen
    return compensator


def _needs_data(recipe: Recipe) -> bool:
    selecting = REDUCERS[recipe.reducer].needs_scores and SELECTORS[recipe.selector].needs_data
    return selecting or COMPENSATORS[recipe.compensate].needs_data


def _nothing(
    prepared: Prepared, recipe: Recipe, chosen: Sequence[Block], refused: Sequence[Refusal], clock: Clock
) -> NothingToCompressError:
    """The error for a run without any block, with its report."""
    found = prepared.survey.blocks
    if chosen and not refused:
        text = f"nothing could be compressed: ratio {recipe.ratio:g} removes no unit from any of {len(chosen)} blocks"
    elif found and not chosen:
        text = f"nothing could be compressed: none of the {len(found)} blocks is of the kinds and names asked for"
    else:
        text = nothing_text([*prepared.survey.refusals, *refused])
    report = report_of(
        prepared,
        recipe,
        changes=(),
        refusals=refused,
        ledger=weights.empty(prepared.survey),
        slim=None,
        output=None,
        verification=None,
        clock=clock,
    )
    return NothingToCompressError(text, report=report)
