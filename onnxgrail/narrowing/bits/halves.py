"""Try layers and weights with more than 8 bits on a few samples."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import onnx_ir as ir

from onnxgrail.allocation.losses import SMALL
from onnxgrail.calibration.feeds.judging import part_of, spread
from onnxgrail.calibration.judge import Judge
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.quantize import LARGE
from onnxgrail.calibration.quantize.form import elsewhere, in_form, too_large
from onnxgrail.calibration.quantize.light import light_of
from onnxgrail.calibration.quantize.static import Trials
from onnxgrail.core import Recipe
from onnxgrail.errors import DataError, ModelError
from onnxgrail.graph.io.model_file import weight_bytes

JUDGED = 4, 16  # least and most samples
READ = 2**25  # bytes of their inputs, if that allows the least number
ROUNDING = 0.4  # share of `max_loss` that rounded weights may take of it before anything is narrowed
MANY = "it needs 16 bits, or 8 would lose too much"

Loss = Callable[[ir.Model], float]
"""Returns the mean loss of a model; infinity if ONNX Runtime does not run it."""


@contextlib.contextmanager
def on_few(prepared: Prepared, model: ir.Model, recipe: Recipe) -> Iterator[Loss | None]:
    """Yield the loss of `int8` candidates on a few samples; None where none can be judged or trials take long.

    Args:
        prepared: the original model and its data.
        model: the model that is quantized.
        recipe: says the kind of quantization.
    """
    if recipe.quantize != "int8" or weight_bytes(model) > SMALL:
        yield None
        return
    base = prepared.baseline
    batches = part_of(base.batches, spread(base.batches, _few(base)))
    with Judge(base.model, batches, recipe.providers, prepared.metric, brief=True) as judge:

        def loss(model: ir.Model) -> float:
            try:
                return judge.loss((model, range(len(batches)))).mean
            except ModelError:
                return math.inf

        try:
            loss(model)
        except DataError:  # no output can be compared
            yield None
        else:
            yield loss


def halves_of(prepared: Prepared, recipe: Recipe) -> dict[str, str]:
    """Return the weights that get 16 bits in all candidates of a search, where `int8` gives 8 to the others; and why.

    They are chosen in the whole model, until rounding takes no more than a share of the largest loss.  For another
    machine, these are the layers that compute in float; for `fp16`, the nodes that stay in float32.
    """
    if recipe.max_loss is None:
        return {}
    if recipe.quantize == "fp16":
        return dict.fromkeys(too_large(prepared, recipe), LARGE)
    with on_few(prepared, prepared.model, recipe) as loss:
        if loss is None:
            return {}
        if elsewhere(recipe):
            trials = Trials(loss, ROUNDING * recipe.max_loss, lambda *_: 1.0)
            return dict.fromkeys(in_form(prepared, prepared.model, recipe, None, trials).kept, MANY)
        light = light_of(prepared.model, list(prepared.batches))
        return dict.fromkeys(light.halves(loss, ROUNDING * recipe.max_loss, worth=0.0).layers, MANY)


def _few(prepared: Prepared) -> int:
    """Return the number of feeds; large images cost more time."""
    least, most = JUDGED
    each = sum(array.nbytes for array in prepared.feed.values()) / prepared.samples
    wanted = min(most, max(least, int(READ / max(each, 1))))
    return -(-wanted * len(prepared.batches) // prepared.batches.samples)
