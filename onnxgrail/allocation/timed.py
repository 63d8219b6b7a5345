"""Widths under a latency target, which can only be measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.allocation.balance import Fit
from onnxgrail.allocation.ladders import Ideal, Ladder, Widths
from onnxgrail.machine.amounts import Target

GRID = (0.25, 0.5, 0.75)
TRIES = 8  # further measurements
CLOSE = 0.97  # share of the limit that ends the search; timing is not more exact
NOISE = 0.01
Stopwatch = Callable[[Mapping[str, int]], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Timing:
    """Widths with the milliseconds of the original, of the limit, and of the last measurement."""

    fit: Fit
    before: float
    limit: float
    found: float


def fitted_to_time(ladders: Sequence[Ladder], ideal: Ideal, stopwatch: Stopwatch, target: Target) -> Timing:
    """Find the least narrowing whose measured latency is within the target.

    A few scalars are measured, the latency in between is interpolated as a decreasing function, and the guess is
    measured until it is close. Latencies are compared as shares of the original's, since both are timed in turn and a
    slow phase of the machine slows both. The chosen widths are measured once more, and that number is reported.

    Args:
        ladders: the blocks.
        ideal: schedule.
        stopwatch: milliseconds of the original and of the model at given widths.
        target: the latency.
    """
    shares: dict[float, float] = {}
    widths: dict[float, Widths] = {}
    originals: list[float] = []

    def share(s: float) -> float:
        widths[s] = rounded(ladders, ideal, s)
        before, after = stopwatch(widths[s])
        originals.append(before)
        return after / before

    shares[0.0], widths[0.0] = 1.0, rounded(ladders, ideal, 0.0)
    for s in (*GRID, 1.0):
        shares[s] = share(s)
    before = float(np.median(originals))
    limit = target.limit(before) / before

    def timing(fit: Fit, found: float) -> Timing:
        return Timing(fit, before, limit * before, found * before)

    if limit >= 1:
        return timing(_fit_at(widths[0.0], ideal, 0.0, reached=True), 1.0)
    for _ in range(TRIES):
        tries = (_guess(shares, (1 + CLOSE) / 2 * limit), _between(shares, limit))
        fresh = [s for s in tries if rounded(ladders, ideal, s) not in widths.values()]
        if not fresh:
            break
        s = fresh[0]
        shares[s] = share(s)
        if CLOSE * limit <= shares[s] <= limit:
            break
    for s in sorted(s for s, found in shares.items() if found <= limit):
        again = share(s)
        if again <= limit * (1 + NOISE):
            return timing(_fit_at(widths[s], ideal, s, reached=True), again)
    return timing(_fit_at(widths[1.0], ideal, 1.0, reached=False), shares[1.0])


def rounded(ladders: Sequence[Ladder], ideal: Ideal, s: float) -> Widths:
    """Return the nearest allowed widths; the largest at s = 0 and the smallest at s = 1 for any schedule."""
    if s <= 0 or s >= 1:
        return {one.name: one.steps[-1] if s <= 0 else one.steps[0] for one in ladders}
    wanted = ideal(s)
    return {one.name: one.nearest(wanted[one.name]) for one in ladders}


def _guess(shares: Mapping[float, float], wanted: float) -> float:
    """Return the scalar at which a decreasing function through the measurements has the wanted value."""
    places = sorted(shares)
    falling = np.minimum.accumulate([shares[s] for s in places])
    return float(np.interp(-wanted, -falling, places))


def _between(shares: Mapping[float, float], limit: float) -> float:
    """Return the middle between the narrowest model that is too slow and the next one."""
    places = sorted(shares)
    slow = max(n for n, s in enumerate(places) if n == 0 or shares[s] > limit)
    return (places[slow] + places[min(slow + 1, len(places) - 1)]) / 2


def _fit_at(widths: Widths, ideal: Ideal, s: float, *, reached: bool) -> Fit:
    """Return the widths at one scalar of a schedule, with those that it asks for."""
    wanted = dict(ideal(s)) if 0 < s < 1 else {name: float(width) for name, width in widths.items()}
    return Fit(widths, wanted, reached=reached)
