"""Preparation: load the model, read or make data, run the model once, trace it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.branching import Maker, Seen, look
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.data import Source, read, read_apart
from onnxgrail.calibration.feeds.judging import AUTO, HeldOut, asked_for, few, words_of
from onnxgrail.calibration.feeds.reading import reading_of
from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.calibration.proof import prove
from onnxgrail.calibration.runtime.session import shapes_of
from onnxgrail.calibration.shapes.dims import Usual
from onnxgrail.calibration.shapes.suiting import suited, told
from onnxgrail.calibration.shapes.synthetic import synthetic
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import Array, Block, Bools, Floats, Recipe, Refusal
from onnxgrail.errors import ModelError, StoppedError, UsageError
from onnxgrail.graph.fittable.scales import widened
from onnxgrail.graph.flatten.branches import Route, folded
from onnxgrail.graph.flatten.listed import NOTHING, Unlisted, relisted, unlist
from onnxgrail.graph.io.interop import from_any
from onnxgrail.graph.io.mapped import unchanged
from onnxgrail.graph.io.model_file import copy, load
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.rewrite.interface import changed, note
from onnxgrail.graph.trace.survey import Ledger, Survey
from onnxgrail.graph.trace.tracer import trace
from onnxgrail.machine.amounts import cache_bytes
from onnxgrail.machine.files.paths import path_of
from onnxgrail.machine.group.sums import SOLO, Group
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Record
from onnxgrail.machine.steps.steps import Steps


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """A model that has been read, run once and traced.

    Attributes:
        source: path, bytes or object as given.
        path: of the model file, None if no file was given.
        model: the graph, with the branches of its If nodes inlined; never changed.
        batches: calibration feeds.
        survey: the trace of the graph.
        feed: the small feed of the trace.
        routes: the branches that each calibration feed takes; empty for a model without branches.
        gradients: `View.gradient` by block; empty if no selector needs it.
        held_out: samples that judge the result and that nothing is fitted to; None if there are none.
        asked: the user's request for held-out samples.
        unlisted: weights that were inputs of the graph and no longer are.
    """

    source: Any
    path: Path | None
    model: ir.Model
    batches: Batches
    survey: Survey
    feed: Mapping[str, Array]
    gradients: Mapping[str, Floats] = field(default_factory=dict)
    held_out: HeldOut | None = None
    asked: str = AUTO
    unlisted: Unlisted = NOTHING
    routes: Mapping[Maker, Route] = field(default_factory=dict)

    @property
    def given(self) -> ir.Model:
        """Return the model with the inputs it was given with, the baseline of speed comparisons."""
        return relisted(self.model, self.unlisted)

    @property
    def samples(self) -> int:
        """Return the number of samples in the probe feed: the common first axis, 1 if there is none."""
        return samples_of(self.feed)

    def as_written(self) -> Prepared:
        """Return a copy with the graph as in the file, for code that does not follow channels into branches."""
        return replace(self, model=folded(self.model))

    @property
    def judges(self) -> Batches:
        """Return the feeds that judge the result: held-out feeds, or else a few calibration feeds."""
        return few(self.batches) if self.held_out is None else self.held_out.batches

    def scarce(self) -> str:
        """Return a warning if the data hold too few samples for reliable statistics, '' otherwise."""
        held = self.held_out
        return self.batches.scarce(0 if held is None or held.own else held.batches.samples)


def samples_of(feed: Mapping[str, Array]) -> int:
    """Return the number of samples in a feed: the common first axis, 1 if there is none."""
    sizes = {array.shape[0] if array.ndim else 1 for array in feed.values()}
    return sizes.pop() if len(sizes) == 1 else 1


def prepare(source: Any, data: Any, job: Job, held_out: Source | int | None = None) -> Prepared:
    """Load a model, read its calibration data, run it once and trace it.

    Args:
        source: the model, as a path or an object.
        data: calibration data of any kind; None for random inputs.
        job: options, clock and processes.
        held_out: data that judge the result, or the number of samples of `data` that do.

    Raises:
        ModelError: the model cannot be read or run.
        DataError: the data do not fit it.
        UsageError: held-out samples are requested without data.
    """
    recipe, clock = job.recipe, job.clock
    with clock.stage("load"):
        model = load(from_any(source))
        unlisted = NOTHING if recipe.keep_initializer_inputs else unlist(model)
    with clock.stage("data"):
        batches, held = _batches(model, data, recipe, job.group, held_out)
    with clock.stage("observe"), unchanged(model):  # the model runs here: its time does not count as tracing
        batches, seen = _running(model, batches, recipe)
    with clock.stage("trace"), unchanged(model):
        survey = trace(seen.model, seen.facts, interface=recipe.kv_io)
        survey = survey if recipe.norms == "none" else widened(seen.model, survey)
    return Prepared(
        source=source,
        path=path_of(source),
        model=seen.model,
        unlisted=unlisted,
        batches=batches,
        survey=survey,
        feed=seen.feed,
        held_out=held,
        asked=words_of(held_out) if held is None else held.asked,
        routes=seen.routes,
    )


def _running(model: ir.Model, batches: Batches, recipe: Recipe) -> tuple[Batches, Seen]:
    """Return feeds that the model runs on and the observed facts; try other sizes of random inputs if it fails."""
    try:
        return batches, look(model, batches, recipe.providers)
    except ModelError as error:
        stopped = isinstance(error, StoppedError)
        if stopped or not batches.synthetic or recipe.input_shapes or error.hint != batches.hint:
            raise
        found, tried = suited(model, functools.partial(_drawn, model, recipe), providers=recipe.providers)
        if found is None:
            raise ModelError(str(error.args[0]), hint=f"{error.hint}. Tried: {told(tried)}") from error
        note = f"the model does not run on the usual sizes; used instead: {shapes_of(found.first())}"
        return replace(found, notes=(*found.notes, note)), look(model, found, recipe.providers)


def _drawn(
    model: ir.Model, recipe: Recipe, usual: Usual | None = None, sizes: Mapping[str, int] | None = None
) -> Batches:
    return synthetic(
        model,
        signature_of(model),
        samples=recipe.samples,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        input_shapes=recipe.input_shapes,
        usual=usual,
        sizes=sizes,
    )


def _batches(model: ir.Model, data: Any, recipe: Recipe, group: Group, held_out: Any) -> tuple[Batches, HeldOut | None]:
    """Return calibration feeds and judging feeds: samples held back from the same data, or data of their own."""
    signature = signature_of(model)
    common: dict[str, Any] = {"samples": recipe.samples, "batch_size": recipe.batch_size, "seed": recipe.seed}
    count, source = asked_for(held_out)
    if count and data is None:
        raise UsageError(f"--held-out {count} needs --data", hint="Random inputs say little about real ones")
    reading = reading_of(
        tokenizer=recipe.tokenizer,
        sequence_length=recipe.sequence_length,
        image_mean=recipe.image_mean,
        image_std=recipe.image_std,
        input_shapes=recipe.input_shapes,
    )
    own: Batches | None = None
    if source is not None:
        own = read(source, signature, reading=reading, group=group, batch_size=recipe.batch_size)
    held: Batches | None = None
    if data is not None:
        batches, held = read_apart(data, signature, count, reading=reading, group=group, **common)
    else:
        if own is None:
            reading.unused(frozenset(), "random inputs")
        batches = _drawn(model, recipe)
    if own is not None:
        return batches, HeldOut(asked=own.source, batches=own, own=True)
    return batches, None if held is None else HeldOut(asked=str(count or AUTO), batches=held, own=False)


def stream_of(prepared: Prepared, recipe: Recipe, group: Group = SOLO, *, share: int = 1) -> Stream:
    """Return the stream of the calibration data through the model.

    Args:
        prepared: the traced model and its data.
        recipe: the options; providers and cache size are used.
        group: the processes that share the batches.
        share: number of streams that divide the cache budget.
    """
    return Stream(
        prepared.model,
        prepared.survey,
        prepared.batches,
        providers=recipe.providers,
        budget=cache_bytes(recipe) // share,
        group=group,
        routes=prepared.routes,
    )


def proved(
    prepared: Prepared,
    recipe: Recipe,
    blocks: Sequence[Block],
    widths: Mapping[str, int],
    dead: Bools | None = None,
    *,
    group: Group = SOLO,
) -> tuple[tuple[Block, ...], tuple[Refusal, ...]]:
    """Return the blocks that narrow exactly to these widths, and refusals for the others.

    The first process of the group computes the proof for all.

    Args:
        prepared: the traced model and its data.
        recipe: the options; the providers are used.
        blocks: candidates.
        widths: number of channels that each keeps, by name.
        dead: mask of the channels to remove; None removes random channels.
        group: the processes that share the work.
    """

    def proof() -> Record:
        model, survey = prepared.model, prepared.survey
        good, refusals = prove(model, survey, blocks, widths, prepared.feed, providers=recipe.providers, dead=dead)
        return Record(notes={"good": [b.name for b in good], "refusals": [asdict(r) for r in refusals]})

    found = Steps(group=group).shared(proof).notes
    return tuple(b for b in blocks if b.name in found["good"]), tuple(Refusal(**r) for r in found["refusals"])


def rounds(prepared: Prepared) -> bool:
    """Return True if activations are quantized within the graph, so that rounding of a sum can change a level."""
    constants = prepared.survey.facts.constants
    return any(
        node.op_type == "QuantizeLinear" and (node.outputs[0].name or "") not in constants
        for node in prepared.model.graph
    )


def narrowed(prepared: Prepared, ledger: Ledger) -> ir.Model:
    """Return a copy of the model with all decisions applied, as it will be written to a file."""
    slim = copy(prepared.model)
    apply(slim.graph, prepared.survey, ledger)
    note(slim, changed(prepared.model, prepared.survey, ledger.dead))
    return folded(slim)


def judged_by(prepared: Prepared) -> dict[str, Any]:
    """Return the report entry on the samples that judge the result and the user's request for them."""
    held = prepared.held_out
    if held is not None:
        return {"on": "held-out", **held_out_entry(held)}
    batches = prepared.judges
    on = "random" if batches.synthetic else "calibration"
    return {"on": on, "asked": prepared.asked, "source": batches.source, "samples": sum(map(samples_of, batches))}


def held_out_entry(held: HeldOut) -> dict[str, Any]:
    """Return the report entry on the held-out samples and the user's request for them."""
    return {"asked": held.asked, "source": held.batches.source, "samples": held.batches.samples}
