"""The data of a run: read from what the user gives, or random inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import onnx_ir as ir

from onnxgrail.calibration.feeds import kinds
from onnxgrail.calibration.feeds.alike import unmixed
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.data import Source, read_apart
from onnxgrail.calibration.feeds.judging import AUTO, HeldOut, apart, asked_for, shared
from onnxgrail.calibration.feeds.reading import Reading, Sampling, reading_of
from onnxgrail.calibration.feeds.signature import WHOLE, signature_of
from onnxgrail.calibration.shapes.dims import Usual, check_names
from onnxgrail.calibration.shapes.synthetic import synthetic
from onnxgrail.core import Recipe
from onnxgrail.errors import ModelError, OnnxGrailError, StoppedError, UsageError
from onnxgrail.machine.job import Job

BIASED = "fits have seen them, and others may lose more"
S = TypeVar("S")
T = TypeVar("T")


def drawn(
    model: ir.Model, recipe: Recipe, usual: Usual | None = None, sizes: Mapping[str, int] | None = None
) -> Batches:
    """Return random inputs as the recipe asks for.

    Args:
        model: the model that is fed.
        recipe: number of samples, batch size, seed and shapes.
        usual: sizes of open dimensions, by what they mean.
        sizes: sizes of open dimensions, by name.
    """
    return synthetic(model, sampling_of(recipe), input_shapes=recipe.input_shapes, usual=usual, sizes=sizes)


def sampling_of(recipe: Recipe) -> Sampling:
    """Return the number of samples, the batch size and the seed of a recipe."""
    feeds = 1 if recipe.max_loss is None else 2  # a search judges by feeds that its fits have not seen
    return Sampling(samples=recipe.samples, batch_size=recipe.batch_size, seed=recipe.seed, feeds=feeds)


def reading_for(recipe: Recipe) -> Reading:
    """Return the settings of a recipe for reading data."""
    return reading_of(
        tokenizer=recipe.tokenizer,
        sequence_length=recipe.sequence_length,
        image_mean=recipe.image_mean,
        image_std=recipe.image_std,
        image_form=recipe.image_form,
        input_shapes=recipe.input_shapes,
    )


def supplied(model: ir.Model, data: Any, job: Job, held_out: Any) -> tuple[Batches, HeldOut | None]:
    """Return calibration feeds and judging feeds: samples held back from the same data, or data of their own.

    Args:
        model: the model that is fed.
        data: calibration data of any kind; None for random inputs.
        job: the choices on data, and the processes that share them.
        held_out: data that judge the result, or the number of samples of `data` that do.

    Raises:
        DataError: the data do not fit the model.
        UsageError: held-out samples are requested without data, or `contents` does not suit the model.
    """
    signature, recipe, group = signature_of(model), job.recipe, job.group
    count, source = asked_for(held_out)
    if count and data is None:
        raise UsageError(f"--held-out {count} needs --data", hint="Random inputs say little about real ones")
    reading = reading_for(recipe)
    check_names(signature, reading.shapes)
    own: Batches | None = None
    seen = 0
    if source is not None:
        every, settings = Sampling(batch_size=recipe.batch_size), _for_one(reading, source, data)
        own, _ = read_apart(source, signature, 0, every, reading=settings, group=group)
        reading = _for_one(reading, data, source)
    held: Batches | None = None
    if data is not None:
        searched = recipe.max_loss is not None and count is None
        back = 0 if searched else count
        batches, held = read_apart(data, signature, back, sampling_of(recipe), reading=reading, group=group)
        if searched and own is None:
            batches, held = apart(unmixed(batches))
        if own is not None and (seen := shared(batches, own)):
            batches = replace(batches, notes=(*batches.notes, _seen(seen, own.samples)))
    else:
        if own is None:
            reading.unused(frozenset(), "random inputs")
        batches = drawn(model, recipe)
    batches = _holding(batches, model, recipe.contents)
    if own is not None:
        return batches, HeldOut(asked=own.source, batches=_holding(own, model, recipe.contents), own=True, seen=seen)
    if held is None:
        return batches, None
    return batches, HeldOut(asked=str(count or AUTO), batches=_holding(held, model, recipe.contents), own=False)


def _for_one(reading: Reading, source: Any, other: Any) -> Reading:
    """Return the settings for one of two sources of data: without those that have an effect on the other one only."""
    left_out: dict[str, Any] = dict.fromkeys(kinds.takes(other) - kinds.takes(source))
    return replace(reading, **left_out)


def _seen(count: int, samples: int) -> str:
    """Return a note on held-out samples that fits see."""
    if count >= samples:
        return f"the held-out data are the calibration data: {BIASED}; leave out --held-out"
    return f"{count:,} of {samples:,} held-out samples are calibration samples: {BIASED}"


def given(
    data: Source | None,
    model: ir.Model,
    reading: Reading,
    sampling: Sampling,
    contents: Mapping[str, str] | None = None,
) -> Batches:
    """Return feeds for a model: the user's data, or random inputs without data.

    Args:
        data: of any kind; None for random inputs.
        model: the model that is fed.
        reading: settings for reading data.
        sampling: the number of samples, and their batches.
        contents: by name of an output, what it holds, as far as the user says it.

    Raises:
        DataError: the data do not fit.
        UsageError: an option on reading data is given without data, or `contents` does not suit the model.
    """
    if data is not None:
        batches = read_apart(data, signature_of(model), 0, sampling, reading=reading)[0]
    else:
        reading.unused(frozenset(), "random inputs")
        batches = synthetic(model, sampling, input_shapes=reading.shapes)
    return _holding(batches, model, contents or {})


def _holding(batches: Batches, model: ir.Model, contents: Mapping[str, str]) -> Batches:
    """Return feeds with what the model's outputs hold, as far as the user says it.

    Raises:
        UsageError: an output is none of the model's, or none would judge.
    """
    names = [value.name or "" for value in model.graph.outputs]
    for name in contents:
        if name not in names:
            raise UsageError(f"--contents: no output {name!r}", hint=f"The outputs are {', '.join(names)}")
    if all(contents.get(name) == "nothing" for name in names):
        raise UsageError("--contents: every output holds nothing, and none would judge")
    return replace(batches, contents=contents)


def ran(model: ir.Model, fed: Callable[[], Batches], run: Callable[[Batches], T]) -> tuple[Batches, T]:
    """Return the data and what a run on them gives: whole files if the model does not run on some of their rows.

    Raises:
        ModelError: it runs on neither.
    """
    batches = fed()
    try:
        with batches.advising():
            return batches, run(batches)
    except ModelError as error:
        whole = None if batches.synthetic or isinstance(error, StoppedError) else ran_whole(model, fed, run)
        if whole is None:
            raise
        return whole


def ran_whole(model: ir.Model, fed: Callable[[], S], run: Callable[[S], T]) -> tuple[S, T] | None:
    """Return data of which every file is one sample, and what a run on them gives; None if the model does not run.

    The model is marked for that, see `Input.whole`.
    """
    model.meta[WHOLE] = True
    with contextlib.suppress(OnnxGrailError):
        whole = fed()
        return whole, run(whole)
    model.meta[WHOLE] = False
    return None
