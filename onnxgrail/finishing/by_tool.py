"""Quantize the narrowed model by the tools of ONNX Runtime."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from onnxgrail.allocation.losses import SMALL
from onnxgrail.calibration import quantize
from onnxgrail.calibration.agreement import same_function
from onnxgrail.calibration.feeds.judging import part_of, spread
from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.calibration.judge import Judge
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.quantize.static import Static, Trials
from onnxgrail.calibration.runtime.latency import in_turn, single
from onnxgrail.core import Feed, Recipe
from onnxgrail.errors import DataError, ModelError
from onnxgrail.graph.io.model_file import weight_bytes
from onnxgrail.graph.io.opset import opset_of, raised
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.rewrite.interface import between, fit
from onnxgrail.machine.job import Job

EIGHT = ("int8", "int8-dynamic")
JUDGED = 4, 16  # least and most samples on which layers in float are tried
READ = 2**25  # bytes of their inputs, if that allows the least number
ENOUGH = 0.01  # loss at which no further layer stays in float, without --max-loss


def modern(model: ir.Model, recipe: Recipe, feed: Feed) -> ir.Model:
    """Return a model with the opset that `--quantize` needs: itself, or a converted copy that gives the same outputs.

    Args:
        model: the model.
        recipe: says the kind of quantization.
        feed: inputs on which both are compared.

    Raises:
        ModelError: it cannot be converted.
    """
    before = opset_of(model)
    if recipe.quantize not in EIGHT or before >= quantize.FIRST_OPSET:
        return model
    made = raised(model, quantize.FIRST_OPSET)
    if not same_function(model, made, feed, recipe.providers):
        raise ModelError(
            f"--quantize {recipe.quantize} needs opset {quantize.FIRST_OPSET}: the model has {before}, and its outputs "
            "change when it is converted",
            hint="Export it with a newer opset",
        )
    return made


def quantised_by_tool(prepared: Prepared, slim: ir.Model, job: Job) -> tuple[ir.Model, dict[str, Any]]:
    """Quantize with the tools of ONNX Runtime; return the model and its part of the report entry."""
    recipe, ports = job.recipe, between(prepared.model, slim)
    feeds = [fit(feed, ports) for feed in prepared.batches] if recipe.quantize == "int8" else []
    symmetric = recipe.target == "tensorrt"
    probe = fit(prepared.feed, ports)
    old = opset_of(slim)
    slim = modern(slim, recipe, probe)
    new = opset_of(slim)
    changed = f"opset {old} has no scales per channel: the model was converted to opset {new}"
    with _trials(prepared, slim, recipe) as trials:
        static = Static(feeds=feeds, symmetric=symmetric, everywhere=symmetric or recipe.qdq, trials=trials)
        made = quantize.quantise(slim, recipe.quantize, given=static, probe=probe, providers=recipe.providers)
    return made.model, {
        "samples": prepared.batches.samples if feeds else 0,
        "symmetric": symmetric,
        "kept_float": list(made.kept),
        "kept_float_reason": made.why if made.kept else "",
        "ops": dict(made.ops),
        "bytes_before": made.bytes_before,
        "bytes_after": made.bytes_after,
        "notes": [] if old == new else [changed],
    }


def _few(prepared: Prepared) -> int:
    """Return the number of feeds on which layers in float are tried; large images cost more time."""
    least, most = JUDGED
    each = sum(array.nbytes for array in prepared.feed.values()) / prepared.samples
    wanted = min(most, max(least, int(READ / max(each, 1))))
    return -(-wanted * len(prepared.batches) // prepared.batches.samples)


@contextlib.contextmanager
def _trials(prepared: Prepared, slim: ir.Model, recipe: Recipe) -> Iterator[Trials | None]:
    """Yield trials of candidates, judged against the original; None where they cannot be judged or take long."""
    base = prepared.baseline
    if recipe.quantize != "int8" or weight_bytes(slim) > SMALL:
        yield None
        return
    batches = part_of(base.batches, spread(base.batches, _few(base)))
    with Judge(base.model, batches, recipe.providers, prepared.metric) as judge:

        def loss(model: ir.Model) -> float:
            try:
                return judge.loss((model, range(len(batches)))).mean
            except ModelError:  # ONNX Runtime does not run it: other layers must stay in float
                return math.inf

        def speed(before: ir.Model, after: ir.Model) -> float:
            feed = single(fit(prepared.feed, between(prepared.model, slim)), signature_of(prepared.model))
            try:
                times = in_turn(pack(before), pack(after), (feed, feed), providers=recipe.providers)
            except ModelError:
                return 0.0
            return times[0] / times[1]

        try:
            loss(slim)
        except DataError:  # no output can be compared
            yield None
        else:
            yield Trials(loss, ENOUGH if recipe.max_loss is None else recipe.max_loss, speed)
