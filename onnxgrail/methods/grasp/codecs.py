"""Encodes the steps of GRASP as records, so that an interrupted run can be resumed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from onnxgrail.algebra.fit.choice import Fitted
from onnxgrail.algebra.fit.lowrank import Pair
from onnxgrail.core import Array
from onnxgrail.machine.steps.codec import Codec, Record
from onnxgrail.machine.steps.steps import Steps
from onnxgrail.methods.grasp.distances import Apart
from onnxgrail.methods.grasp.pairs import Slope

NUMBERS = ("alpha", "blend", "before", "after")

REDUNDANCIES: Codec[dict[str, float]] = Codec(
    lambda layers: Record(notes={"layers": layers}), lambda record: dict(record.notes["layers"])
)
PAIR: Codec[Pair] = Codec(
    lambda pair: Record(arrays={"down": pair.down, "up": pair.up}, notes={"lost": pair.lost}),
    lambda record: Pair(record.arrays["down"], record.arrays["up"], record.notes["lost"]),
)
APART: Codec[Apart] = Codec(lambda apart: Record(notes=dataclasses.asdict(apart)), lambda record: Apart(**record.notes))


def _of_fit(fit: tuple[Fitted, Array]) -> Record:
    return Record(arrays={"up": fit[1]}, notes={name: getattr(fit[0], name) for name in NUMBERS})


def _fit_of(record: Record) -> tuple[Fitted, Array]:
    nothing = np.zeros(0)
    return Fitted(weights=nothing, shift=nothing, **record.notes), record.arrays["up"]


FIT: Codec[tuple[Fitted, Array]] = Codec(_of_fit, _fit_of)
"""Encodes a fit, and the fitted values in the layout of the model."""


def pair_key(weight: str) -> str:
    """Return the cache key of a weight's pair."""
    return f"grasp pair {weight}"


def fit_key(weight: str) -> str:
    """Return the cache key of a fit."""
    return f"grasp fit {weight}"


def slope(steps: Steps, weights: Iterable[str], measured: Callable[[], Slope]) -> Slope:
    """Return the loss, and gradients at least for the weights that still need them.

    Each weight has its own file; the loss is stored last, as the mark that all of them are complete.
    """
    known = steps.known("grasp loss")
    arrays = {w: steps.known(f"grasp gradient {w}") for w in weights} if known is not None else {}
    if known is not None and None not in arrays.values():
        gradients = {w: record.arrays["gradient"] for w, record in arrays.items() if record is not None}
        return Slope(what=known.notes["what"], value=known.notes["value"], gradients=gradients)
    found = measured()
    for weight, gradient in found.gradients.items():
        steps.keep(f"grasp gradient {weight}", Record(arrays={"gradient": gradient}))
    steps.keep("grasp loss", Record(notes={"what": found.what, "value": found.value}))
    return found
