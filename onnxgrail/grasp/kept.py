"""Steps of a run that may be killed: what each of them found is kept, and not sought again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from onnxgrail.algebra.lowrank import Pair
from onnxgrail.algebra.refit import Fitted
from onnxgrail.core import Array
from onnxgrail.grasp.errors import Apart
from onnxgrail.grasp.pairs import Slope
from onnxgrail.journal import Journal
from onnxgrail.record import Record

NUMBERS = ("alpha", "blend", "before", "after")


def redundancies(journal: Journal, measured: Callable[[], dict[str, float]]) -> dict[str, float]:
    """How alike every layer's input and output are."""
    known = journal.get("grasp redundancy")
    if known is not None:
        return dict(known.notes["layers"])
    found = measured()
    journal.put("grasp redundancy", Record(notes={"layers": found}))
    return found


def pair(journal: Journal, weight: str) -> Pair | None:
    """What a weight becomes, where that is known."""
    known = journal.get(f"grasp pair {weight}")
    return None if known is None else Pair(known.arrays["down"], known.arrays["up"], known.notes["lost"])


def keep_pair(journal: Journal, weight: str, made: Pair) -> None:
    """Note what a weight becomes."""
    record = Record(arrays={"down": made.down, "up": made.up}, notes={"lost": made.lost})
    journal.put(f"grasp pair {weight}", record)


def slope(journal: Journal, weights: Iterable[str], measured: Callable[[], Slope]) -> Slope:
    """The loss, and gradients at least for the weights that still need them.

    Each weight has a file of its own; the loss is noted last and says that all of them are there.
    """
    known = journal.get("grasp loss")
    arrays = {w: journal.get(f"grasp gradient {w}") for w in weights} if known is not None else {}
    if known is not None and None not in arrays.values():
        gradients = {w: record.arrays["gradient"] for w, record in arrays.items() if record is not None}
        return Slope(what=known.notes["what"], value=known.notes["value"], gradients=gradients)
    found = measured()
    for weight, gradient in found.gradients.items():
        journal.put(f"grasp gradient {weight}", Record(arrays={"gradient": gradient}))
    journal.put("grasp loss", Record(notes={"what": found.what, "value": found.value}))
    return found


def fit(journal: Journal, weight: str) -> tuple[Fitted, Array] | None:
    """A fit and the numbers that are written for it, where they are known."""
    known = journal.get(f"grasp fit {weight}")
    if known is None:
        return None
    nothing = np.zeros(0)
    return Fitted(weights=nothing, shift=nothing, **known.notes), known.arrays["up"]


def keep_fit(journal: Journal, weight: str, found: Fitted, up: Array) -> None:
    """Note a fit and the numbers that are written for it, as they are stored in the model."""
    notes = {name: getattr(found, name) for name in NUMBERS}
    journal.put(f"grasp fit {weight}", Record(arrays={"up": up}, notes=notes))


def apart(journal: Journal, when: str, measured: Callable[[], Apart]) -> Apart:
    """How far outputs and layers are from the reference's, without the fits or with them."""
    known = journal.get(f"grasp apart {when}")
    if known is not None:
        return Apart(**known.notes)
    found = measured()
    journal.put(f"grasp apart {when}", Record(notes=dataclasses.asdict(found)))
    return found
