"""Latencies of models, measured in turn, and widths under a target for the latency."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.allocation.balance import Fit
from onnxgrail.allocation.ladders import Ideal, Ladder, Widths
from onnxgrail.allocation.measures import ledger_of
from onnxgrail.calibration.feeds.signature import signature_of
from onnxgrail.calibration.prepared import Prepared, narrowed
from onnxgrail.calibration.runtime.latency import in_turn, single, times_of
from onnxgrail.calibration.runtime.timing import Times
from onnxgrail.core import Recipe
from onnxgrail.graph.io.model_file import HEAVY, running_bytes, weight_bytes
from onnxgrail.graph.io.serial import pack, to_bytes
from onnxgrail.graph.rewrite import interface
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


def fitted_to_time(ladders: Sequence[Ladder], ideal: Ideal, watch: Stopwatch, target: Target) -> Timing:
    """Find the least narrowing whose measured latency is within the target.

    A few scalars are measured, the latency in between is interpolated as a decreasing function, and the guess is
    measured until it is close. Latencies are compared as shares of the original's, since both are timed in turn and a
    slow phase of the machine slows both. The chosen widths are measured once more, and that number is reported.

    Args:
        ladders: the blocks.
        ideal: schedule.
        watch: milliseconds of the original and of the model at given widths.
        target: the latency.
    """
    shares: dict[float, float] = {}
    widths: dict[float, Widths] = {}
    originals: list[float] = []

    def share(s: float) -> float:
        widths[s] = rounded(ladders, ideal, s)
        before, after = watch(widths[s])
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


def stopwatch(prepared: Prepared, recipe: Recipe) -> Stopwatch:
    """Return a function that times a run of the original and of the model at given widths in turn, in milliseconds."""
    feed = single(next(iter(prepared.batches)), signature_of(prepared.model))
    before = to_bytes(prepared.given)

    def timed(widths: Mapping[str, int]) -> tuple[float, float]:
        ledger = ledger_of(prepared, widths)
        slim = narrowed(prepared, ledger)
        after = to_bytes(slim)
        feeds = feed, interface.fit(feed, interface.between(prepared.model, slim))
        return in_turn(before, after, feeds, providers=recipe.providers)

    return timed


def latencies(
    models: Sequence[ir.Model], prepared: Prepared, recipe: Recipe, *, most: float = math.inf
) -> tuple[Times, ...] | None:
    """Measure the milliseconds per run of a model and of results of narrowing it, in turns.

    Args:
        models: the original first.
        prepared: the original.
        recipe: the options; the providers are used.
        most: bytes that the weights of all models may take together while they run.

    Returns:
        None if the models are too large to open again.

    Raises:
        ModelError: ONNX Runtime does not run one of them.
    """
    if max(map(weight_bytes, models)) > HEAVY or sum(map(running_bytes, models)) > most:
        return None
    feed = single(prepared.feed, signature_of(prepared.model))
    feeds = [interface.fit(feed, interface.between(prepared.model, model)) for model in models]
    return times_of(map(pack, models), feeds, providers=recipe.providers)
