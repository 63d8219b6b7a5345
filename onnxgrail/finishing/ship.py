"""Finish the narrowed model for deployment: simplify, verify, quantize, check against a runtime's limits."""

from __future__ import annotations

import dataclasses
import math

import onnx_ir as ir

from onnxgrail.allocation.timed import latencies
from onnxgrail.calibration import quantize
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.quantize.form import modern
from onnxgrail.calibration.runtime.session import LIBRARIES
from onnxgrail.calibration.runtime.timing import Times
from onnxgrail.core import Recipe
from onnxgrail.errors import UsageError
from onnxgrail.finishing import quantized, simplify, targets
from onnxgrail.finishing.shipped import Shipped
from onnxgrail.finishing.verify import verified
from onnxgrail.graph.bits import plan
from onnxgrail.graph.io.model_file import bytes_on_disk, weight_bytes
from onnxgrail.graph.io.writing import written_bytes
from onnxgrail.machine.extras import require as require_extra
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.decide import Decision
from onnxgrail.recipe import storage

LARGEST_GRAPH = 2**24  # upper limit of the bytes of a model's names, nodes and metadata
NAMES, TINY = 2**12, 2**16  # bytes: tolerated growth by a few names, and the file size below which it is tolerated
UNASKED = 2**31  # bytes of weights of running models up to which latency is measured without being asked for
STEPS = ("original", "narrowed", "quantized")


def require(recipe: Recipe) -> None:
    """Check that the packages which the recipe needs are installed.

    Raises:
        MissingExtraError: a package is not.
    """
    if recipe.simplify:
        require_extra("onnxslim", "simplify", "--simplify needs onnxslim")


def check(prepared: Prepared, recipe: Recipe) -> None:
    """Check that the original model can be quantized as requested, before hours of work.

    Raises:
        ModelError: quantization was requested, and the model is quantized already, is too large, or has an old opset
            and cannot be converted.
        UsageError: ONNX Runtime's quantizer would open it without the custom operators it needs.
    """
    if recipe.quantize == "int8" and LIBRARIES.get():
        hint = "Choose --quantize int8-dynamic or fp16"
        raise UsageError("--quantize int8 opens the model without the libraries of --custom-ops", hint=hint)
    if recipe.quantize != "none":
        quantize.refuse(prepared.model, recipe.quantize)
        modern(prepared.model, recipe, prepared.feed)
    plan.check(prepared.model, recipe)


def ship(prepared: Prepared, decision: Decision, slim: ir.Model, job: Job, *, latency: bool = False) -> Shipped:
    """Turn the narrowed model into the model that is written.

    Simplification comes after the narrowing, because names of nodes and weights in options and report are those of the
    given file, and before the comparison, which judges both.  Quantization comes last, because least squares needs
    float weights.

    Args:
        prepared: the original model and its data.
        decision: narrowed it, and says how many bits weights have.
        slim: the narrowed model.
        job: the run.
        latency: measure the latency of the original and the result.

    Raises:
        ModelError: a tool fails, or ONNX Runtime does not run the result.
    """
    recipe, clock, simplified = job.recipe, job.clock, None
    if recipe.simplify:
        with clock.stage("simplify"):
            slim, simplified = simplify.simplify(slim)
    storage.mark(slim, recipe, held_out=job.held_out)
    verification, results = verified(prepared, slim, job)
    final, quantization = slim, None
    if recipe.quantize != "none" or decision.allocation.lowers:
        with clock.stage("quantize"):
            final, quantization, last = quantized.quantised(prepared, decision, slim, job)
            results = last if recipe.check else results
    times: tuple[Times, ...] | None = None
    if latency or (quantization is not None and recipe.check):
        with clock.stage("latency"):
            models = [prepared.given, slim, *([final] if quantization else [])]
            times = latencies(models, prepared, recipe, most=math.inf if latency else UNASKED)
    named = None if times is None else dict(zip(STEPS, times, strict=False))
    if quantization is not None and named:
        quantization["latency_ms"] = {name: one.median for name, one in named.items()}
        quantization["notes"] += _slow(named[STEPS[1]], named[STEPS[2]])
    keys = {
        "latency": None if named is None else [{"name": n, **dataclasses.asdict(one)} for n, one in named.items()],
        "simplify": None if simplified is None else dataclasses.asdict(simplified),
        "quantization": quantization,
        "target": None if recipe.target is None else targets.check(final, recipe.target, strict=recipe.strict),
    }
    return Shipped(
        model=final, narrowed=slim, verification=verification, results=results, keys=keys, weights=job.weights
    )


def _slow(before: Times, after: Times) -> list[str]:
    """Return a note if the quantized model is slower than without quantization, beyond noise."""
    if before.interval is None or after.interval is None or after.interval[1] >= before.interval[0]:
        return []
    share = after.median / before.median
    return [f"on this machine the quantized model takes {share:.2f} times as long as before: only its file is smaller"]


def outgrown(prepared: Prepared, shipped: Shipped, recipe: Recipe) -> tuple[str, str] | None:
    """Return the reason why a result may not be written, and a hint: it takes more bytes than the input.

    The metadata on the run are shortened if they would make the file larger.  In a very small file, a few more names
    are tolerated.
    """
    path, model = prepared.path, shipped.model
    before = written_bytes(prepared.given) if path is None else bytes_on_disk(prepared.original, path)
    if weight_bytes(model) + LARGEST_GRAPH < before:
        return None
    after = written_bytes(model, shipped.weights)
    if after > before:
        storage.shorten(model)
        after = written_bytes(model, shipped.weights)
    nothing_asked = recipe.keeps_everything and recipe.quantize == "none"
    if nothing_asked or "ic" in recipe.refine or after <= before + (NAMES if before < TINY else 0):
        return None
    text = f"the result would take {after:,} bytes, more than the {before:,} of the input; nothing is written"
    if shipped.weights and written_bytes(model) <= before:
        return text, "Give --no-save-as-external-data: names and offsets of weights in a second file take bytes, too"
    return text, _hint(shipped, recipe)


def _hint(shipped: Shipped, recipe: Recipe) -> str:
    """Return what makes a result smaller that would take more bytes than the input."""
    model, entry = shipped.model, shipped.keys["quantization"]
    if recipe.simplify:
        return "Leave out --simplify, which writes repeated constants out"
    if recipe.quantize in quantized.NO_CONV and any(node.op_type == "Conv" for node in model.graph):
        return f"--quantize {recipe.quantize} leaves convolutions in float; --quantize int8 has them too"
    if entry is not None and recipe.quantize != "none":
        return f"Leave out --quantize: {quantized.why_little(model, entry)}"
    if recipe.max_loss is not None:
        return "Give a larger --max-loss: new biases take more bytes than so few units"
    return "Remove more, or choose other blocks; --compensate none writes no new weights"
