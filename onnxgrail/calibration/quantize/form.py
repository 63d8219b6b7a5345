"""Quantize a narrowed model by the tools of ONNX Runtime: as it is written, and as a search judges it before."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.agreement import same_function
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.judging import spread
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.quantize import FIRST_OPSET, Quantised, quantise
from onnxgrail.calibration.quantize.light import light_of
from onnxgrail.calibration.quantize.overflow import overflowing
from onnxgrail.calibration.quantize.static import Static, Trials
from onnxgrail.core import Feed, Recipe
from onnxgrail.errors import ModelError
from onnxgrail.graph.io.likeness import like
from onnxgrail.graph.io.opset import opset_of, raised
from onnxgrail.options import EIGHT

FEW = 32  # samples by which ranges are narrowed


def modern(model: ir.Model, recipe: Recipe, feed: Feed) -> ir.Model:
    """Return a model with the opset that `--quantize` needs: itself, or a converted copy that gives the same outputs.

    Raises:
        ModelError: it cannot be converted.
    """
    before = opset_of(model)
    if recipe.quantize not in EIGHT or before >= FIRST_OPSET:
        return model
    made = like(raised(model, FIRST_OPSET), model)
    if not same_function(model, made, feed, recipe.providers):
        raise ModelError(
            f"--quantize {recipe.quantize} needs opset {FIRST_OPSET}: the model has {before}, and its outputs "
            "change when it is converted",
            hint="Export it with a newer opset",
        )
    return made


def in_form(
    prepared: Prepared,
    slim: ir.Model,
    recipe: Recipe,
    half: Collection[str] | None = None,
    trials: Trials | None = None,
    tried: bool = True,
) -> Quantised:
    """Return the quantized model.

    Args:
        prepared: the original model and its data.
        slim: the narrowed model.
        recipe: says the kind of quantization.
        half: for `int8`, see `Static`; for `fp16`, nodes that stay in float32.
        trials: measure which layers compute in float, for `int8` only.
        tried: False to leave out the trial run of the result.
    """
    probe = prepared.fed_small(slim)
    symmetric = recipe.target == "tensorrt"
    static = Static(
        feeds=_feeds(prepared, slim, recipe),
        real=not prepared.batches.synthetic,
        few=_few(prepared.fed(slim)) if recipe.quantize == "int8" and not prepared.batches.synthetic else (),
        half=half,
        symmetric=symmetric,
        everywhere=elsewhere(recipe),
        trials=trials,
    )
    return quantise(
        modern(slim, recipe, probe),
        recipe.quantize,
        given=static,
        probe=probe,
        providers=recipe.providers,
        tried=tried,
    )


def as_judged(prepared: Prepared, slim: ir.Model, recipe: Recipe, half: Collection[str]) -> ir.Model:
    """Return the quantized model as a search judges it: no layers are tried, and `int8` is in the weights alone.

    Whether layers compute in 8 bits, too, is decided for the model that was found, see `quantise_static`.
    """
    if recipe.quantize != "int8" or elsewhere(recipe):
        return in_form(prepared, slim, recipe, half or None).model
    return light_of(slim, _feeds(prepared, slim, recipe)).stored(half)


def too_large(prepared: Prepared, recipe: Recipe) -> tuple[str, ...]:
    """Return the nodes that stay in float32 because their numbers are too large for half precision."""
    if recipe.quantize != "fp16" or prepared.batches.synthetic:
        return ()
    facts = prepared.survey.facts
    floats = {name for name, dtype in facts.dtypes.items() if dtype == np.float32 and 0 not in facts.shapes[name]}
    return overflowing(prepared.model, floats, _few(prepared.batches), recipe.providers)


def elsewhere(recipe: Recipe) -> bool:
    """Return True if the model is for another machine, so that layers compute in 8 bits in any case."""
    return recipe.qdq or recipe.target == "tensorrt"


def _feeds(prepared: Prepared, slim: ir.Model, recipe: Recipe) -> list[Feed]:
    """Return the data for ranges and biases, as the narrowed model takes them."""
    return [*prepared.fed(slim)] if recipe.quantize == "int8" else []


def _few(batches: Batches) -> list[Feed]:
    """Return some of the data, evenly spread, by which ranges are narrowed."""
    count = min(len(batches), max(1, FEW * len(batches) // max(batches.samples, 1)))
    return [make() for make in spread(batches, count)]
