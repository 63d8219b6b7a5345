"""Measures errors of a model with replaced layers: at its outputs and after every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Array, Recipe
from onnxgrail.fidelity import Sums, add_batch, finish
from onnxgrail.fidelity.lists import lists_of
from onnxgrail.graph.cuts.residual import Layer
from onnxgrail.methods.grasp.measure import outputs_of, rows_of, walk_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Apart:
    """Errors on the calibration data.

    Attributes:
        model: divergence or squared error of the outputs, as `fidelity` measures them.
        layers: by name, squared error of a layer's output as a share of its energy in the reference.
    """

    model: float
    layers: Mapping[str, float]


def apart(prepared: Prepared, recipe: Recipe, reference: ir.Model, slim: ir.Model, layers: Sequence[Layer]) -> Apart:
    """Run both models once over the data and compute their errors; padding tokens do not count."""
    outputs = outputs_of(slim)
    names = list(dict.fromkeys([*outputs, *(layer.end for layer in layers)]))
    wanted, got = (walk_of(prepared, model, recipe).source(names) for model in (reference, slim))
    sums, lists = dict[str, Sums](), lists_of(reference.graph.outputs)
    squares = {layer.name: np.zeros(2) for layer in layers}
    for batch, mask in enumerate(prepared.masks()):
        goal, now = wanted(batch), got(batch)
        ends = ({n: side[n] for n in outputs} for side in (goal, now))
        sums = add_batch(sums, *lists.leveled({}, *ends), mask=mask)
        for layer in layers:
            squares[layer.name] += _squares(*(rows_of(a[layer.end], mask) for a in (goal, now)))
    errors = [r.kl if r.kl is not None else r.nmse for r in finish(sums)]
    return Apart(
        model=float(np.mean([e for e in errors if e is not None] or [0.0])),
        layers={name: float(error / energy) if energy else 0.0 for name, (error, energy) in squares.items()},
    )


def _squares(goal: Array, now: Array) -> Array:
    """Compute squared error and energy of rows."""
    a, b = goal.astype(np.float64), now.astype(np.float64)
    return np.array([np.square(b - a).sum(), np.square(a).sum()])
