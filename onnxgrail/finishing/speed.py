"""Take the model of a tool for quantization only where it is not slower, if latency is minimized on this machine."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.quantize import Quantised, added
from onnxgrail.calibration.quantize.form import elsewhere
from onnxgrail.calibration.quantize.light import light_of, storable
from onnxgrail.calibration.runtime.latency import in_turn
from onnxgrail.calibration.runtime.session import CPU
from onnxgrail.core import Feed, Recipe
from onnxgrail.errors import ModelError
from onnxgrail.graph.io.serial import pack
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.search.latency import SLOWER

SPEED: Codec[float] = Codec(lambda speed: Record(notes={"speed": speed}), lambda record: record.notes["speed"])


def not_slower(prepared: Prepared, slim: ir.Model, made: Quantised, job: Job) -> tuple[Quantised, str]:
    """Return the model of a tool, or one with as many bits that computes in float, if latency is minimized and less.

    Of `int8`, the kernels are measured one by one, see `quantise_static`.

    Returns:
        The model, and a note if it is not that of the tool.
    """
    recipe, kind = job.recipe, job.recipe.quantize
    if kind == "int8" or not recipe.wants_latency or elsewhere(recipe) or recipe.providers[0] not in CPU:
        return made, ""
    steps, feed = job.steps.alone(), prepared.one_sample(slim)
    speed = steps.once("speed of the tool's model", lambda: speed_of(slim, made.model, feed, recipe), SPEED)
    if speed == 0 or speed >= SLOWER:
        return made, ""
    half = [weight.origin for weight in storable(slim)] if kind == "fp16" else []
    feeds = [] if half or prepared.batches.synthetic else [*prepared.fed(slim)]
    plain = light_of(slim, feeds).stored(half)
    note = (
        f"on this machine --quantize {kind} takes {1 / speed:.2f} times as long as float, so layers compute in float "
        f"and only weights have {16 if half else 8} bits; --minimize size has it for all"
    )
    return replace(made, model=plain, kept=(), why="", ops=added(slim, plain)), note


def speed_of(before: ir.Model, after: ir.Model, feed: Feed, recipe: Recipe) -> float:
    """Return how many times as fast as the first model the second one runs; 0 if ONNX Runtime does not run it."""
    try:
        times = in_turn(pack(before), pack(after), (feed, feed), providers=recipe.providers)
    except ModelError:
        return 0.0
    return times[0] / times[1]
