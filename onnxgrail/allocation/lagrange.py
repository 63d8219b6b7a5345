"""The schedule `global`: minimizes losses plus prices of all blocks with one multiplier. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from onnxgrail.allocation.balance import Fit
from onnxgrail.allocation.fit import Worth, fitted
from onnxgrail.allocation.ladders import Ideal, Ladder, Widths
from onnxgrail.core import Floats

RANGE = (-10.0, 10.0)  # exponents of the multiplier
ROUNDS = 4  # iterations, since prices depend on widths and widths on prices
PRICED = 9  # widths at which a block's price is computed; others are interpolated


def lagrangian(
    ladders: Sequence[Ladder], losses: Mapping[str, Floats], measure: Callable[[Mapping[str, int]], float], limit: float
) -> Fit:
    """Compute widths with a small sum of losses under a budget; prices are those around the widths found before.

    Args:
        ladders: the blocks.
        losses: per block, the loss at each of its steps.
        measure: cost of widths.
        limit: the budget.
    """

    def harm(some: Mapping[str, int]) -> float:
        return sum(float(losses[name][place[name][width]]) for name, width in some.items())

    place = {one.name: {step: n for n, step in enumerate(one.steps)} for one in ladders}
    widths: Widths = {one.name: one.units for one in ladders}
    best: tuple[float, Fit] | None = None
    for _ in range(ROUNDS):
        costs = {one.name: prices(one, measure, widths) for one in ladders}
        worth = gain(ladders, losses, costs)
        found = fitted(ladders, multiplied(ladders, losses, costs), measure, limit, worth, harm)
        if best is None or harm(found.widths) < best[0]:
            best = harm(found.widths), found
        if found.widths == widths:
            break
        widths = found.widths
    assert best is not None
    return best[1]


def prices(one: Ladder, measure: Callable[[Mapping[str, int]], float], widths: Widths) -> Floats:
    """Compute the cost of the model at each step of one block, others as given, as a share of the narrowed model."""
    places = np.unique(np.linspace(0, len(one.steps) - 1, PRICED).round().astype(int))
    known = [measure(widths | {one.name: one.steps[place]}) for place in places]
    values = np.interp(one.steps, [one.steps[place] for place in places], known)
    return np.asarray((values - values[0]) / max(measure(widths), 1.0))


def multiplied(ladders: Sequence[Ladder], losses: Mapping[str, Floats], costs: Mapping[str, Floats]) -> Ideal:
    """Return a schedule: argmin over widths of loss + λ price per block, with λ over twenty orders of magnitude.

    Args:
        ladders: the blocks.
        losses: per block, the loss at each of its steps.
        costs: per block, the cost of each of its steps, as a share of the whole model.
    """

    def ideal(s: float) -> dict[str, float]:
        lam = 10.0 ** (RANGE[0] + s * (RANGE[1] - RANGE[0]))
        found = {}
        for one in ladders:
            total = losses[one.name] + lam * costs[one.name]
            found[one.name] = float(one.steps[int(np.flatnonzero(total <= total.min())[-1])])
        return found

    return ideal


def gain(ladders: Sequence[Ladder], losses: Mapping[str, Floats], costs: Mapping[str, Floats]) -> Worth:
    """Return a function that computes the decrease of loss per price of a step up."""
    place = {one.name: {step: n for n, step in enumerate(one.steps)} for one in ladders}

    def worth(name: str, width: int, up: int) -> float:
        a, b = place[name][width], place[name][up]
        saved = float(losses[name][a] - losses[name][b])
        return saved / max(float(costs[name][b] - costs[name][a]), 1e-12)

    return worth
