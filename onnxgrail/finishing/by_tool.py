"""Quantize the narrowed model by the tools of ONNX Runtime."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir

from onnxgrail.allocation.found import Found
from onnxgrail.allocation.measures import measure_of
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.quantize import Quantised
from onnxgrail.calibration.quantize.form import elsewhere, in_form, too_large
from onnxgrail.calibration.quantize.static import Trials
from onnxgrail.core import Feed, Recipe
from onnxgrail.errors import ModelError
from onnxgrail.finishing.speed import SPEED, not_slower, speed_of
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.io.writing import written_bytes
from onnxgrail.machine.amounts import target_of
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.narrowing.bits.halves import on_few
from onnxgrail.search.candidates import loss_of
from onnxgrail.search.kernels import Durations, durations

DURATIONS: Codec[Sequence[Durations]] = Codec(
    lambda times: Record(notes={"times": list(times)}), lambda record: record.notes["times"]
)
FULL = "--target-size leaves no room for layers with more than 8 bits, which would lose less"
ENOUGH = 0.01  # loss at which no further layer stays in float, without --max-loss


def quantised_by_tool(
    prepared: Prepared, slim: ir.Model, found: Found | None, job: Job
) -> tuple[ir.Model, dict[str, Any]]:
    """Quantize with the tools of ONNX Runtime; return the model and its part of the report entry.

    Args:
        prepared: the original model and its data.
        slim: the narrowed model.
        found: by a search, which judged candidates with some weights in 16 bits.
        job: the run.
    """
    recipe = job.recipe
    spared = (too_large(prepared, recipe) or None) if found is None else found.spared
    with _trials(prepared, slim, job) as trials:
        made = in_form(prepared, slim, recipe, spared, trials)
    made, large = _small_enough(prepared, slim, made, job)
    made, slow = not_slower(prepared, slim, made, job)
    old, new = opset_of(slim), opset_of(made.model)
    changed = f"opset {old} has no scales per channel: the model was converted to opset {new}"
    return made.model, {
        "samples": prepared.batches.samples if recipe.quantize == "int8" else 0,
        "symmetric": recipe.target == "tensorrt",
        "kept_float": list(made.kept),
        "kept_float_reason": made.why if made.kept else "",
        "ops": dict(made.ops),
        "notes": [*([] if old == new else [changed]), *filter(None, [large, slow])],
    }


def _small_enough(prepared: Prepared, slim: ir.Model, made: Quantised, job: Job) -> tuple[Quantised, str]:
    """Return the model of a tool, or one with 8 bits in more layers if a target for the size needs it, and a note."""
    target = target_of(job.recipe)
    if job.recipe.quantize != "int8" or target is None or target.metric != "size":
        return made, ""
    limit = target.limit(measure_of(prepared, "size").given)
    if written_bytes(made.model, job.weights) <= limit:
        return made, ""
    return in_form(prepared, slim, job.recipe, None if elsewhere(job.recipe) else ()), FULL


@contextlib.contextmanager
def _trials(prepared: Prepared, slim: ir.Model, job: Job) -> Iterator[Trials | None]:
    """Yield trials of candidates, judged against the original; None where they cannot be judged or take long.

    What is measured once is not measured again if the run is continued.
    """
    recipe, steps, pairs = job.recipe, job.steps.alone(), itertools.count()
    with on_few(prepared, slim, recipe) as loss:

        def holds(model: ir.Model) -> bool:
            most = recipe.max_loss
            return most is None or loss_of(prepared, model, recipe.providers).bound <= most

        feed = prepared.one_sample(slim)

        def kernels(models: Sequence[ir.Model]) -> Sequence[Durations]:
            return steps.once("kernels in 8 bits", lambda: _durations(models, feed, recipe), DURATIONS)

        def speed(before: ir.Model, after: ir.Model) -> float:
            return steps.once(f"speed in 8 bits {next(pairs)}", lambda: speed_of(before, after, feed, recipe), SPEED)

        target = ENOUGH if recipe.max_loss is None else recipe.max_loss
        yield None if loss is None else Trials(loss, target, speed, holds, kernels)


def _durations(models: Sequence[ir.Model], feed: Feed, recipe: Recipe) -> Sequence[Durations]:
    """Return the milliseconds of the nodes of models; nothing if ONNX Runtime does not run one of them."""
    try:
        return durations(models, feed, recipe.providers)
    except ModelError:
        return ()
