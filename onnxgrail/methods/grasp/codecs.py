"""How the steps of GRASP are stored, so that a killed run goes on where it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from onnxgrail.algebra.fit.lowrank import Pair
from onnxgrail.algebra.fit.refit import Fitted
from onnxgrail.core import Array
from onnxgrail.machine.steps.codec import Record
from onnxgrail.machine.steps.steps import Codec, Steps
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
"""A fit, and the numbers that are written for it, as they are stored in the model."""


def pair_key(weight: str) -> str:
    """Return the key of what a weight becomes."""
    return f"grasp pair {weight}"


def fit_key(weight: str) -> str:
    """Return the key of a fit."""
    return f"grasp fit {weight}"


def slope(steps: Steps, weights: Iterable[str], measured: Callable[[], Slope]) -> Slope:
    """Return the loss, and gradients at least for the weights that still need them.

    Each weight has a file of its own; the loss is stored last and says that all of them are there.
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
