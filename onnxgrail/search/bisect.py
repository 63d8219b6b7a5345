"""Finds how far along a path a model may go until its measured loss exceeds a limit. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from onnxgrail.search.path import Path, Paths

FIRST, AIM = 0.6, 0.92  # shares of the limit that the first prediction, which is of a mean, and later ones aim at
LEAST, MOST = 1e-4, 1e4  # bounds of the measured loss over the predicted one
CAUTION = 0.5  # share of the room above a candidate that holds, per candidate that failed since
OTHERS = 4  # most times that a search goes on without blocks that were predicted wrongly
AGAIN = 2  # candidates of each path that goes on, and least candidates after the first one that holds
FILLED, GAIN = 0.8, 0.005  # share of the limit from which no path goes on, and share of the cost that is worth a try
MORE = 0.02  # the same, as a share of what is saved already
Judged = Callable[[Path, int], float]
"""Returns the measured bound of the loss after a number of steps of a path."""


class Patience(NamedTuple):
    """The most candidates that are decided and judged, and the share of the limit that ends the search."""

    tries: int
    close: float


@dataclass(frozen=True, slots=True, eq=False)
class Seek:
    """The aim and the limits of a search.

    Attributes:
        limit: the largest loss.
        judged: measures a candidate, at no cost a second time.
        stop: True ends the search early, once a candidate holds.
        patience: ends the search on a path, too.
    """

    limit: float
    judged: Judged
    stop: Callable[[], bool]
    patience: Patience


class Reach(NamedTuple):
    """The largest number of steps of a path that holds, its loss, and the smallest larger one that does not hold.

    0 steps have no loss. If all steps hold, one more than there are does not.
    """

    good: int
    loss: float
    bad: int


def farthest_of(paths: Paths, seek: Seek) -> tuple[Path, int]:
    """Return a path, and the number of its steps that `farthest` finds.

    Where losses jump, far below the limit or at the first step, some blocks were predicted wrongly: those of the steps
    between the candidate that holds and the one that does not.  They keep their widths, and the search goes on with
    steps of the others that are predicted to fit into what is left, as long as that saves something.

    Args:
        paths: see `Paths`.
        seek: see `Seek`.

    Returns:
        The last path, and 0 if no candidate holds.
    """
    path, closed = paths.without(), set[str]()
    found, saved = farthest(path, seek), 1.0
    for _ in range(OTHERS):
        if not path.steps or found.loss > FILLED * seek.limit or saved < GAIN or seek.stop():
            break
        closed |= {step.block for step in path.steps[found.good : found.bad]}
        room = seek.limit - found.loss
        if not found.good:
            small = paths.within(FIRST * room, closed=closed)
            path = small if small.steps else paths.without(closed)
            found = farthest(path, seek)
            continue
        longer = paths.within(path.loss(found.good) + room, path.steps[: found.good], closed)
        if _saved(longer, found.good, len(longer)) < GAIN:
            break
        few = replace(seek, patience=seek.patience._replace(tries=AGAIN))
        first = longer.reach(longer.loss(found.good) + FIRST * room)
        known, path = found, longer
        found = farthest(path, few, first, known._replace(bad=len(path) + 1))
        saved = _saved(path, known.good, found.good)
    return path, found.good


def _saved(path: Path, before: int, after: int) -> float:
    """Return what the steps between two numbers of steps save, as a share of the whole cost."""
    return (path.cost(before) - path.cost(after)) / path.before


def _little(path: Path, good: int, most: int) -> bool:
    """Return True if steps after those that hold save too little for another candidate."""
    return _saved(path, good, most) < min(GAIN, MORE * _saved(path, 0, good))


def cheaper(found: tuple[Path, int], other: Path, seek: Seek) -> tuple[Path, int]:
    """Return another path and the number of its steps if these hold and cost less than what was found, else that.

    Args:
        found: a path and the number of its steps.
        other: a path; the search on it begins where its cost gets less.
        seek: see `Seek`.
    """
    path, best = found
    least = next((n for n in range(1, len(other) + 1) if other.cost(n) < path.cost(best)), 0)
    if not least or seek.stop() or seek.judged(other, least) > seek.limit:
        return found
    return other, farthest(other, seek, first=least).good


def farthest(path: Path, seek: Seek, first: int = 0, known: Reach | None = None) -> Reach:
    """Return the largest number of steps, of those tried, whose measured loss is within the limit.

    The measured loss over the predicted one is taken as constant at first. Afterwards it is extrapolated (log-log) from
    two candidates that do not hold, and interpolated between those that hold and that do not; each candidate that fails
    after one that holds makes the next step more cautious (Illinois rule), since it would only creep downwards else.
    The search ends where what is left between them saves little.

    Args:
        path: nested widths with predicted losses.
        seek: see `Seek`.
        first: number of steps to try first; 0 leaves it to the prediction.
        known: steps that hold.
    """
    good, loss, bad = known or Reach(0, 0.0, len(path) + 1)
    found = {good: loss} if good else {}
    wanted = first or path.reach(FIRST * seek.limit)
    left = seek.patience.tries
    while left > 0 or not (good or bad <= 1 or 1 in found):
        place, wanted = _next(path, seek.limit, found, (good, bad), wanted), 0
        if place is None or (good and (seek.stop() or _little(path, good, bad - 1))):
            break
        place = place if left > 0 else 1  # the smallest step: if it does not hold, nothing on this path does
        found[place] = seek.judged(path, place)
        left -= 1
        if found[place] > seek.limit:
            bad = place
            continue
        left = left if good else max(left, AGAIN)
        good = place
        if found[place] >= seek.patience.close * seek.limit:
            break
    return Reach(good, found.get(good, 0.0), bad)


def _next(path: Path, limit: float, found: dict[int, float], between: tuple[int, int], wanted: int) -> int | None:
    """Return the next number of steps to try, between those that hold and those that do not; None if none is left."""
    good, bad = between
    if bad - good <= 1:
        return None
    if wanted or not found:
        guess = wanted
    elif good in found and bad in found:
        guess = path.reach(_interpolated(path, AIM * limit, found, good, bad))
    else:
        last = good if good in found else bad
        rate = min(max(found[last] / max(path.loss(last), 1e-9), LEAST), MOST)
        guess = path.reach(AIM * limit / rate)
        if good:
            guess = max(guess, min(path.reach(_on_line(path, AIM * limit, found)), (good + bad) // 2))
        if not good and len(found) > 1:  # a loss that jumps is not predicted: get below the jump while there are tries
            guess = min(guess, max(path.reach(_extrapolated(path, AIM * limit, found)), bad // 2))
    return min(max(guess, good + 1), bad - 1)


def _extrapolated(path: Path, aim: float, found: dict[int, float]) -> float:
    """Return the predicted loss at which the measured one should be `aim`, from the two lowest that were measured."""
    one, two = sorted(found)[:2]
    rise = math.log(max(found[two], 1e-9) / max(found[one], 1e-9))
    run = math.log(max(path.loss(two), 1e-9) / max(path.loss(one), 1e-9))
    slope = min(rise / run, 1.0) if rise > 0 and run > 0 else 0.0
    return path.loss(one) * (aim / found[one]) ** (1 / slope) if slope else 0.0


def _on_line(path: Path, aim: float, found: dict[int, float]) -> float:
    """Return the predicted loss at which the measured one should be `aim`, on a line through the last two that hold.

    Some of a loss does not grow with the steps, such as that of fewer bits.
    """
    if len(found) == 1:
        return 0.0
    one, two = sorted(found)[-2:]
    rise, run = found[two] - found[one], path.loss(two) - path.loss(one)
    return path.loss(two) + (aim - found[two]) * run / rise if rise > 0 else math.inf


def _interpolated(path: Path, aim: float, found: dict[int, float], good: int, bad: int) -> float:
    """Return the predicted loss at which the measured one should be `aim`."""
    fails = len(found) - 1 - list(found).index(good)
    low, high = (math.log(max(path.loss(n), 1e-9)) for n in (good, bad))
    first, last = (math.log(max(found[n], 1e-9) / aim) for n in (good, bad))
    first *= CAUTION**fails
    share = -first / (last - first) if last > first else 0.5
    return math.exp(low + min(max(share, 0.1), 0.9) * (high - low))
