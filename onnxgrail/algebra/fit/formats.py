"""Checks fitted weights, computed in float64, against the range of the file's number formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from onnxgrail.algebra.fit.choice import Fitted
from onnxgrail.algebra.narrow import plain_weights
from onnxgrail.core import Change, Outcome, View

MATERIAL = 2.0  # clamping a number that exceeds the range by more than this factor changes it too much


def in_range(view: View, change: Change, limits: Sequence[float]) -> Change:
    """Return the change with the count of values to be clamped; with plain weights if clamping would change too much.

    Args:
        view: the block before the change.
        change: the decision.
        limits: largest finite number per slot, infinity if there is none.
    """
    beyond = [(np.abs(values), limits[number]) for number, values in change.weights]
    count = sum(int((size > limit).sum()) for size, limit in beyond)
    if not count:
        return change
    worst = max(float(size.max() / limit) for size, limit in beyond)
    if worst <= MATERIAL or change.error.compensated is None:
        return dataclasses.replace(change, outcome=dataclasses.replace(change.outcome, clamped=count))
    return dataclasses.replace(
        change,
        weights=tuple(plain_weights(view, change.reducer).items()),
        outcome=Outcome(status="plain", reason=_beyond(count, worst)),
        error=dataclasses.replace(change.error, compensated=change.error.plain),
    )


def fit_in_range(found: Fitted, limit: float) -> tuple[Fitted, int, str]:
    """Count the values of a fit to be clamped; drop the fit if clamping would change too much.

    Args:
        found: weights of a layer.
        limit: the largest finite number of their format.

    Returns:
        The fit, the count, and the reason if the fit was dropped, else ''.
    """
    size = np.abs(found.weights)
    count, worst = int((size > limit).sum()), float(size.max(initial=0.0) / limit)
    if not count or found.alpha is None:
        return found, 0, ""
    if worst <= MATERIAL:
        return found, count, ""
    stays = dataclasses.replace(found, alpha=None, blend=0.0, after=found.before)
    return stays, 0, _beyond(count, worst)


def _beyond(count: int, worst: float) -> str:
    return f"{count} compensated weights are beyond the range of their number format, by up to {worst:.2g} times"
