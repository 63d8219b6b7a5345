"""Quantize the narrowed model by the tools of ONNX Runtime."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from onnxgrail.allocation.found import Found
from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.quantize.form import in_form
from onnxgrail.calibration.quantize.static import Trials
from onnxgrail.calibration.runtime.latency import in_turn, single
from onnxgrail.core import Recipe
from onnxgrail.errors import ModelError
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.rewrite.interface import between, fit
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.bits.halves import on_few
from onnxgrail.search.candidates import loss_of

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
    with _trials(prepared, slim, recipe) as trials:
        made = in_form(prepared, slim, recipe, None if found is None else found.half, trials)
    old, new = opset_of(slim), opset_of(made.model)
    changed = f"opset {old} has no scales per channel: the model was converted to opset {new}"
    return made.model, {
        "samples": prepared.batches.samples if recipe.quantize == "int8" else 0,
        "symmetric": recipe.target == "tensorrt",
        "kept_float": list(made.kept),
        "kept_float_reason": made.why if made.kept else "",
        "ops": dict(made.ops),
        "bytes_before": made.bytes_before,
        "bytes_after": made.bytes_after,
        "notes": [] if old == new else [changed],
    }


@contextlib.contextmanager
def _trials(prepared: Prepared, slim: ir.Model, recipe: Recipe) -> Iterator[Trials | None]:
    """Yield trials of candidates, judged against the original; None where they cannot be judged or take long."""
    with on_few(prepared, slim, recipe) as loss:

        def holds(model: ir.Model) -> bool:
            most = recipe.max_loss
            return most is None or loss_of(prepared, model, recipe.providers).bound <= most

        def speed(before: ir.Model, after: ir.Model) -> float:
            feed = single(fit(prepared.feed, between(prepared.model, slim)), signature_of(prepared.model))
            try:
                times = in_turn(pack(before), pack(after), (feed, feed), providers=recipe.providers)
            except ModelError:
                return 0.0
            return times[0] / times[1]

        target = ENOUGH if recipe.max_loss is None else recipe.max_loss
        yield None if loss is None else Trials(loss, target, speed, holds)
