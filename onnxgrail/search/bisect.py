"""Finds how far along a path a model may go until its measured loss exceeds a limit. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from onnxgrail.search.path import Path, Paths

FIRST, AIM = 0.6, 0.92  # shares of the limit that the first prediction, which is of a mean, and later ones aim at
LEAST, MOST = 1e-4, 1e4  # bounds of the measured loss over the predicted one
CAUTION = 0.5  # share of the room above a candidate that holds, per candidate that failed since
OTHERS = 4  # most blocks that are left whole because their smallest step alone exceeds the limit
Judged = Callable[[int], float]
"""Returns the measured bound of the loss after a number of steps."""


class Patience(NamedTuple):
    """The most candidates that are decided and judged, and the share of the limit that ends the search."""

    tries: int
    close: float


def farthest_of(
    without: Paths,
    limit: float,
    judged: Callable[[Path, int], float],
    stop: Callable[[], bool],
    patience: Patience,
) -> tuple[Path, int]:
    """Return a path, and the number of its steps that `farthest` finds.

    A block whose smallest step alone exceeds the limit was predicted wrongly.  It stays whole then, and the search goes
    on along the path of the others, from its first step.

    Args:
        without: the paths.
        limit: the largest loss.
        judged: measures a candidate.
        stop: True ends the search early.
        patience: of the search on each path.

    Returns:
        The last path, and 0 if no candidate holds.
    """
    whole: list[str] = []
    path = without(whole)
    best = farthest(path, limit, partial(judged, path), stop, patience)
    while path.steps and not best and len(whole) < OTHERS and not stop():
        whole.append(path.steps[0].block)
        path = without(whole)
        best = farthest(path, limit, partial(judged, path), stop, patience, first=1)
    return path, best


def cheaper(
    found: tuple[Path, int],
    other: Path,
    limit: float,
    judged: Callable[[Path, int], float],
    stop: Callable[[], bool],
    patience: Patience,
) -> tuple[Path, int]:
    """Return another path and the number of its steps if these hold and cost less than what was found, else that.

    Args:
        found: a path and the number of its steps.
        other: a path.
        limit: the largest loss.
        judged: measures a candidate, at no cost a second time.
        stop: True ends the search early.
        patience: of the search on the other path, which begins where its cost gets less.
    """
    path, best = found
    least = next((n for n in range(1, len(other) + 1) if other.cost(n) < path.cost(best)), 0)
    if not least or stop() or judged(other, least) > limit:
        return found
    return other, farthest(other, limit, partial(judged, other), stop, patience, first=least)


def farthest(
    path: Path,
    limit: float,
    judged: Judged,
    stop: Callable[[], bool],
    patience: Patience,
    first: int = 0,
) -> int:
    """Return the largest number of steps, of those tried, whose measured loss is within the limit.

    The measured loss over the predicted one is taken as constant at first. Afterwards it is extrapolated (log-log) from
    two candidates that do not hold, and interpolated between those that hold and that do not; each candidate that fails
    after one that holds makes the next step more cautious (Illinois rule), since it would only creep downwards else.

    Args:
        path: nested widths with predicted losses.
        limit: the largest loss.
        judged: measures a candidate.
        stop: True ends the search early, once a candidate holds.
        patience: ends the search, too.
        first: number of steps to try first; 0 leaves it to the prediction.

    Returns:
        0 if no candidate holds.
    """
    good, bad = 0, len(path) + 1
    found: dict[int, float] = {}
    for _ in range(patience.tries):
        place = _next(path, limit, found, (good, bad), first)
        if place is None or (good and stop()):
            break
        found[place] = judged(place)
        if found[place] <= limit:
            good = place
            if found[place] >= patience.close * limit:
                break
        else:
            bad = place
    if not good and bad > 1 and 1 not in found and judged(1) <= limit:
        good = 1  # the smallest step: if it does not hold, nothing on this path does
    return good


def _next(path: Path, limit: float, found: dict[int, float], between: tuple[int, int], first: int) -> int | None:
    """Return the next number of steps to try, between those that hold and those that do not; None if none is left."""
    good, bad = between
    if bad - good <= 1:
        return None
    if not found:
        guess = first or path.reach(FIRST * limit)
    elif good in found and bad in found:
        guess = path.reach(_interpolated(path, AIM * limit, found, good, bad))
    else:
        last = good if good in found else bad
        rate = min(max(found[last] / max(path.loss(last), 1e-9), LEAST), MOST)
        guess = path.reach(AIM * limit / rate)
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


def _interpolated(path: Path, aim: float, found: dict[int, float], good: int, bad: int) -> float:
    """Return the predicted loss at which the measured one should be `aim`."""
    fails = len(found) - 1 - list(found).index(good)
    low, high = (math.log(max(path.loss(n), 1e-9)) for n in (good, bad))
    first, last = (math.log(max(found[n], 1e-9) / aim) for n in (good, bad))
    first *= CAUTION**fails
    share = -first / (last - first) if last > first else 0.5
    return math.exp(low + min(max(share, 0.1), 0.9) * (high - low))
