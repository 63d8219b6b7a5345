"""Bits of weights as steps of a path, beside the widths of blocks: their names and their losses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.algebra.rounding.grid import nearest
from onnxgrail.allocation.few import Bits, Rung, with_bits
from onnxgrail.allocation.ladders import Cost, Widths
from onnxgrail.allocation.measures import Measure
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.quantize.light import Light, light_of
from onnxgrail.core import Array
from onnxgrail.graph.attributes import numbers_of
from onnxgrail.graph.bits.folded import Codes
from onnxgrail.graph.bits.plan import FLOAT, Form, with_initializers
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.rewrite.unique import origin
from onnxgrail.search.harms import POWERS, Harm, Tried

PREFIX = "bits of "  # of the name of a weight among the names of blocks
LEFT = 0.25  # share of the squared error of rounding to nearest that is left if errors are carried on


def step_of(weight: str) -> str:
    """Return the name under which the bits of a weight are steps of a path."""
    return PREFIX + weight


def split(widths: Mapping[str, int]) -> tuple[Widths, Bits]:
    """Return the widths of blocks, and the bits of weights in the order in which they were lowered."""
    blocks = {name: width for name, width in widths.items() if not name.startswith(PREFIX)}
    return blocks, {name.removeprefix(PREFIX): bits for name, bits in widths.items() if name not in blocks}


def cost_of(measure: Measure, rungs: Sequence[Rung]) -> Cost:
    """Return the cost of widths and bits."""

    def cost(widths: Mapping[str, int]) -> float:
        blocks, bits = split(widths)
        return with_bits(measure, rungs, bits)(blocks)

    return cost


def harms_of_bits(
    prepared: Prepared, rungs: Sequence[Rung], trial: Callable[[ir.Model], Tried]
) -> list[Callable[[], Harm]]:
    """Return a function per weight that measures the loss of the model with only this weight in fewer bits.

    The loss is measured at the fewest bits, rounded to nearest; at more bits, its power is proportional to the squared
    error of the weight. Of both, errors that are carried on leave a share; those of codes are not.

    Args:
        prepared: the model.
        rungs: the weights.
        trial: measures a model.
    """
    model = with_initializers(prepared.model)

    @functools.cache
    def light() -> Light:
        return light_of(model, list(prepared.batches))

    def with_numbers(rung: Rung, numbers: Array) -> ir.Model:
        slim = copy(model)
        value = _stored(slim, rung)
        value.const_value = ir.tensor(np.ascontiguousarray(numbers), name=value.name)
        return slim

    def harm(rung: Rung) -> Harm:
        array = numbers_of(_stored(light().source if rung.coded else model, rung))
        power = float(np.square(array, dtype=np.float64).sum()) or 1.0
        few = {bits: _numbers(form, array) for bits, form in rung.forms.items()}
        errors = [float(np.square(numbers - array, dtype=np.float64).sum()) / power for numbers in few.values()]
        least = rung.least
        loss, kind = trial(light().with_bits({rung.weight: least}) if rung.coded else with_numbers(rung, few[least]))
        steep, left = 1 / POWERS.get(kind, 1.0), [1.0 if isinstance(f, Codes) else LEFT for f in rung.forms.values()]
        shares = [
            share * error / errors[-1] if errors[-1] > 0 else 0.0 for share, error in zip(left, errors, strict=True)
        ]
        losses = [loss * share**steep for share in shares]
        return Harm(step_of(rung.weight), FLOAT, kind, tuple(rung.forms), tuple(losses), tuple(errors))

    return [functools.partial(harm, rung) for rung in rungs]


def _stored(model: ir.Model, rung: Rung) -> ir.Value:
    """Return the constant that holds a weight, which may have another name in another basis."""
    return next(value for name, value in model.graph.initializers.items() if origin(name) == rung.weight)


def _numbers(form: Form | Codes, array: Array) -> Array:
    """Return the numbers of a weight in a form, rounded to nearest."""
    if isinstance(form, Codes):
        return form.numbers(array)
    flat = array.reshape(len(array), -1)
    rounded = nearest(flat.T if form.turned else flat, form.grid).values().astype(array.dtype)
    return (rounded.T if form.turned else rounded).reshape(array.shape)
