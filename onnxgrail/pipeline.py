"""The product: compress a model.  Read `compress` first; everything else in the project is called from here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail import plan
from onnxgrail.algebra.compensate import COMPENSATORS
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.selectors import SELECTORS
from onnxgrail.calibration.data import Batches, read
from onnxgrail.calibration.observe import observe, probe_feed
from onnxgrail.calibration.proof import prove
from onnxgrail.calibration.signature import signature_of
from onnxgrail.calibration.stream import Stream
from onnxgrail.calibration.synthetic import synthetic
from onnxgrail.core import Block, Change, Progress, Recipe, Refusal, Stats, View, silent
from onnxgrail.errors import NothingToCompressError
from onnxgrail.graph import weights
from onnxgrail.graph.model_io import load, save
from onnxgrail.graph.rewrite import apply
from onnxgrail.graph.survey import Ledger, Survey
from onnxgrail.graph.trace import trace
from onnxgrail.methods.grail import reduce_and_compensate
from onnxgrail.order import Step, steps


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """A model that has been read, run once and traced."""

    model: ir.Model
    folder: Path | None
    batches: Batches
    survey: Survey
    feed: Mapping[str, Any]


@dataclass(slots=True)
class Clock:
    """Seconds per stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of a with-block towards a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def prepare(source: Any, data: Any, recipe: Recipe, clock: Clock) -> Prepared:
    """Load, read or draw data, run once, trace.

    Raises:
        ModelError: the model cannot be read or run.
        DataError: the data do not fit it.
    """
    with clock.stage("load"):
        model = load(source)
        folder = Path(source).parent if isinstance(source, (str, Path)) else None
        signature = signature_of(model)
    with clock.stage("data"):
        if data is None:
            batches = synthetic(
                model,
                signature,
                samples=recipe.samples,
                batch_size=recipe.batch_size,
                seed=recipe.seed,
                input_shapes=recipe.input_shapes,
            )
        else:
            batches = read(
                data, signature, samples=recipe.samples, batch_size=recipe.batch_size, seed=recipe.seed
            )
    with clock.stage("trace"):
        feed = probe_feed(next(iter(batches)), signature)
        facts = observe(model, feed, providers=recipe.providers, folder=folder)
        survey = trace(model, facts)
    return Prepared(model=model, folder=folder, batches=batches, survey=survey, feed=feed)


def decide(prepared: Prepared, recipe: Recipe, clock: Clock, progress: Progress) -> tuple[Ledger, list[Change], list[Refusal]]:
    """Choose widths, prove them, calibrate and compensate block by block.

    Raises:
        NothingToCompressError: no block can lose a unit.
    """
    model, survey = prepared.model, prepared.survey
    chosen = plan.selected(survey.blocks, recipe)
    kept = plan.widths(chosen, recipe)
    narrowed = [b for b in chosen if kept[b.name] < b.units]
    refused: list[Refusal] = []
    if narrowed:
        with clock.stage("prove"):
            progress("checking that every block narrows exactly", 0, 1)
            proven, refused = _proven(prepared, narrowed, kept, recipe)
            progress("checking that every block narrows exactly", 1, 1)
        narrowed = list(proven)
    if not narrowed and recipe.ratio > 0:
        raise NothingToCompressError(_nothing(prepared, chosen, refused, recipe))
    with clock.stage("calibrate"):
        ledger, changes = _calibrated(prepared, narrowed, kept, recipe, progress)
    return ledger, changes, refused


def _proven(
    prepared: Prepared, narrowed: Sequence[Block], kept: Mapping[str, int], recipe: Recipe
) -> tuple[tuple[Block, ...], list[Refusal]]:
    good, refused = prove(
        prepared.model,
        prepared.survey,
        narrowed,
        kept,
        prepared.feed,
        providers=recipe.providers,
        folder=prepared.folder,
    )
    return good, list(refused)


def _calibrated(
    prepared: Prepared, narrowed: Sequence[Block], kept: Mapping[str, int], recipe: Recipe, progress: Progress
) -> tuple[Ledger, list[Change]]:
    """One decision after the other; in closed loop each sees the network as decided so far."""
    model, survey = prepared.model, prepared.survey
    ledger = weights.empty(survey)
    changes: list[Change] = []

    def settle(block: Block, stats: tuple[Stats, ...]) -> None:
        nonlocal ledger
        view = View(block=block, weights=weights.read(block, model, survey, ledger), stats=stats)
        rng = np.random.default_rng((recipe.seed, int(block.ids[0])))
        change = reduce_and_compensate(
            view,
            kept[block.name],
            selector=SELECTORS[recipe.selector],
            reducer=REDUCERS[recipe.reducer],
            compensator=_compensator(recipe),
            rng=rng,
        )
        changes.append(change)
        ledger = weights.record(change, model, survey, ledger)

    if not _needs_data(recipe):
        for block in narrowed:
            settle(block, ())
        return ledger, changes
    todo = steps(narrowed, closed_loop=recipe.closed_loop)
    total, done = len(prepared.batches) * len(todo), 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress("calibrating", done, total)

    with Stream(
        model, survey, prepared.batches, providers=recipe.providers, folder=prepared.folder
    ) as stream:
        for step in todo:
            stream.advance(ledger, step.limit)
            probes = [p for block in step.blocks for p in block.probes]
            found = iter(stream.measure(probes, ledger, tick))
            measured = [tuple(next(found) for _ in block.probes) for block in step.blocks]
            for block, stats in zip(step.blocks, measured, strict=True):
                settle(block, stats)
    return ledger, changes


def _compensator(recipe: Recipe) -> Any:
    import dataclasses

    chosen = COMPENSATORS[recipe.compensate]
    names = {f.name for f in dataclasses.fields(chosen)}  # type: ignore[arg-type]
    return dataclasses.replace(chosen, alpha=recipe.ridge) if "alpha" in names else chosen  # type: ignore[type-var,call-arg]


def _needs_data(recipe: Recipe) -> bool:
    selecting = REDUCERS[recipe.reducer].needs_scores and SELECTORS[recipe.selector].needs_data
    return selecting or COMPENSATORS[recipe.compensate].needs_data


def _nothing(prepared: Prepared, chosen: Sequence[Block], refused: Sequence[Refusal], recipe: Recipe) -> str:
    from onnxgrail.report import nothing_text

    if chosen and not refused:
        return f"nothing could be compressed: a ratio of {recipe.ratio:g} removes not one unit of {len(chosen)} blocks"
    if prepared.survey.blocks and not chosen:
        return f"nothing could be compressed: none of {len(prepared.survey.blocks)} blocks was selected"
    return nothing_text([*prepared.survey.refusals, *refused])


def finished(prepared: Prepared, ledger: Ledger) -> ir.Model:
    """A copy of the model with all decisions written in."""
    slim = prepared.model.clone()
    apply(slim.graph, prepared.survey, ledger)
    return slim
