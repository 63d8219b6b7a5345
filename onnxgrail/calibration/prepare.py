"""Preparation: load the model, read or make data, run the model once, trace it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from onnxgrail.calibration.branching import Seen, look
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.data import Source
from onnxgrail.calibration.feeds.judging import HeldOut, check_halves, words_of
from onnxgrail.calibration.feeds.kept import trimmed
from onnxgrail.calibration.metric import Function, metric_of
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.repaired import surveyed
from onnxgrail.calibration.runtime.wording import shapes_of
from onnxgrail.calibration.shapes.suiting import suited, told
from onnxgrail.calibration.supply import drawn, ran_whole, supplied
from onnxgrail.errors import ModelError, OnnxGrailError, StoppedError, UsageError
from onnxgrail.graph.flatten.direct import direct
from onnxgrail.graph.io.interop import from_any
from onnxgrail.graph.io.mapped import unchanged
from onnxgrail.graph.io.model_file import load
from onnxgrail.machine.files.paths import path_of
from onnxgrail.machine.job import Job
from onnxgrail.options import MAX_LOSS, Recipe

PASSED = "every file is one sample, because the model does not run on some of its rows"
ROOM = 2**30  # bytes that all activations of a run may have: two runs at a time keep those that are read


def check_data(recipe: Recipe, data: Any) -> None:
    """Check that there are data if a loss is to be measured.

    Raises:
        UsageError: there are none.
    """
    if recipe.max_loss is None or data is not None:
        return
    default = " (the default)" if recipe.max_loss == MAX_LOSS else ""
    raise UsageError(
        f"--max-loss {100 * recipe.max_loss:g}%{default} needs --data: without data no loss can be measured",
        hint="Give --data (calib.npz, a folder of images, a text file, file.py:function), or --ratio 0.2 for a size "
        "without a promise of quality",
    )


def prepare(
    source: Any, data: Any, job: Job, held_out: Source | int | None = None, metric: str | Function | None = None
) -> Prepared:
    """Load a model, read its calibration data, run it once and trace it.

    Args:
        source: the model, as a path or an object.
        data: calibration data of any kind; None for random inputs.
        job: options, clock and processes.
        held_out: data that judge the result, or the number of samples of `data` that do.
        metric: the user's own loss, which judges a search.

    Raises:
        ModelError: the model cannot be read or run.
        DataError: the data do not fit it.
        UsageError: held-out samples are requested without data, or a loss without a search.
        MetricError: the loss is no function of three arguments.
    """
    recipe, clock = job.recipe, job.clock
    if metric is not None and recipe.max_loss is None:
        raise UsageError("--metric needs --max-loss: without it, no loss is limited")
    with clock.stage("load"):
        model = load(from_any(source))
        unlisted = direct(model, keep_inputs=recipe.keep_initializer_inputs)
        whole, (model, tables, refusals) = model, trimmed(model, recipe.keep_tokens, tied=recipe.max_loss is None)
    with unchanged(model):
        batches, held, seen = _fed(model, data, job, held_out)
    if recipe.max_loss is not None and held is None:
        check_halves(batches)
    with clock.stage("trace"), unchanged(model):
        found, survey = surveyed(seen.model, seen.facts, recipe, synthetic=batches.synthetic)
        survey = replace(survey, refusals=(*survey.refusals, *refusals))
    return Prepared(
        path=path_of(source),
        model=found,
        unlisted=unlisted,
        batches=batches,
        survey=survey,
        feed=seen.feed,
        held_out=held,
        asked=words_of(held_out) if held is None else held.asked,
        routes=seen.routes,
        metric=None if metric is None else metric_of(metric),
        whole=None if whole is model and found is seen.model else whole,
        trimmed=tables,
    )


def _fed(model: ir.Model, data: Any, job: Job, held_out: Any) -> tuple[Batches, HeldOut | None, Seen]:
    """Return feeds, those that judge, and the observed facts; the error of a model says if it runs on one sample."""
    recipe, clock = job.recipe, job.clock
    with clock.stage("data"):
        batches, held = supplied(model, data, job, held_out)
    try:
        with clock.stage("observe"):  # the model runs here: its time does not count as tracing
            found, seen = _running(model, batches, recipe)
    except ModelError as error:
        if data is None or isinstance(data, Iterator) or isinstance(error, StoppedError):
            raise
        if recipe.batch_size > 1 and _runs_alone(model, data, job, held_out):
            raise ModelError(str(error.args[0]), hint="It runs on one sample at a time: give --batch-size 1") from error
        whole = _whole(model, data, job, held_out)
        if whole is None:
            raise
        return whole
    if seen.whole and not isinstance(data, Iterator):  # as `look` has seen: feeds count, not their rows
        with clock.stage("data"):
            batches, held = supplied(model, data, job, held_out)
        return batches, held, seen
    size = max(1, min(recipe.batch_size, ROOM // max(seen.bytes_each, 1)))
    if found is batches and size < recipe.batch_size and not isinstance(data, Iterator):
        with clock.stage("data"):
            smaller, others = supplied(model, data, _in_runs_of(size, job), held_out)
        if len(smaller) > len(batches):
            note = f"samples per run: {size} instead of {recipe.batch_size}, because activations are large"
            return replace(smaller, notes=(*smaller.notes, note)), others, seen
    return found, held, seen


def _runs_alone(model: ir.Model, data: Any, job: Job, held_out: Any) -> bool:
    """Return True if the model runs on a single sample."""
    try:
        look(model, supplied(model, data, _in_runs_of(1, job), held_out)[0], job.recipe.providers)
    except OnnxGrailError:
        return False
    return True


def _whole(model: ir.Model, data: Any, job: Job, held_out: Any) -> tuple[Batches, HeldOut | None, Seen] | None:
    """Return what `_fed` does if every file is one sample; None if that is not so."""

    def see(fed: tuple[Batches, HeldOut | None]) -> Seen:
        seen = look(model, fed[0], job.recipe.providers)
        if not seen.is_one:
            raise ModelError("its outputs count rows")
        return seen

    found = ran_whole(model, lambda: supplied(model, data, job, held_out), see)
    if found is None:
        return None
    (batches, held), seen = found
    return replace(batches, notes=(*batches.notes, PASSED)), held, seen


def _in_runs_of(size: int, job: Job) -> Job:
    """Return the job with at most `size` samples per run."""
    return replace(job, recipe=replace(job.recipe, batch_size=size))


def _running(model: ir.Model, batches: Batches, recipe: Recipe) -> tuple[Batches, Seen]:
    """Return feeds that the model runs on and the observed facts; try other sizes of random inputs if it fails."""
    try:
        return batches, look(model, batches, recipe.providers)
    except ModelError as error:
        stopped = isinstance(error, StoppedError)
        if stopped or not batches.synthetic or recipe.input_shapes or error.hint != batches.hint:
            raise
        found, tried = suited(model, functools.partial(drawn, model, recipe), providers=recipe.providers)
        if found is None:
            raise ModelError(str(error.args[0]), hint=f"{error.hint}. Tried: {told(tried)}") from error
        note = f"the model does not run on the usual sizes; used instead: {shapes_of(found.first())}"
        return replace(found, notes=(*found.notes, note)), look(model, found, recipe.providers)
