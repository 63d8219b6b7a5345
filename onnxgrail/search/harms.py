"""Measures the loss of the model's outputs with one block narrowed, block by block, at all of its widths."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail.algebra.moments.curves import Narrow
from onnxgrail.allocation.ladders import Ladder
from onnxgrail.core import Change, Floats, View

SHARES = (0.03, 0.0625, 0.125, 0.1875, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
"""Shares of the units without which a block is decided; there is a level halfway between neighbors, too."""
HALFWAY = tuple((low + high) / 2 for low, high in itertools.pairwise(SHARES))
LEAST = 2e-5  # share of the cost that a narrower width saves at least: a modeled latency is not known better
NOTHING = 1e-9  # error of what only rounding changes
FIRST = 2  # level that is tried first
LEAP = 3  # levels to the next trial
TRIALS = 3  # most trials of a block around a limit
TWICE, DEEPER = 2, 2.0  # trials near a share, the second one with that part of the width
HALF = 0.5  # least width at which a block is tried with fits, as a share of its units
POWERS = {"classes": 2.0, "scores": 2.0, "sequences": 2.0, "text": 2.0}
"""Powers of the losses that add up over blocks, by kind of output; 1 for others.

Errors of blocks are nearly independent, so that their squares add up. Differences of probabilities grow with the root
of a squared error, NMSE and KL divergence with the squared error itself.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Near:
    """The region in which losses matter: around a limit of the loss, or around a share of the units removed.

    Attributes:
        limit: infinite for a share.
        share: None for a limit.
    """

    limit: float = math.inf
    share: float | None = None

    @property
    def least(self) -> float:
        """Return the least width, as a share of the units, at which a block is tried with fits."""
        return HALF if self.share is None else 1 - self.share

    def next(self, levels: Mapping[int, int], units: int, tried: Mapping[int, float]) -> int | None:
        """Return the number of the level to try after others, whose losses are known; None if these suffice.

        Args:
            levels: widths that may be tried, by number.
            units: u.
            tried: losses by number, in order.
        """
        if self.share is not None:
            wanted = (1 - self.share) * units / DEEPER ** len(tried)
            place = min(levels, key=lambda number: abs(levels[number] - wanted))
        else:
            now = list(tried)[-1] if tried else None
            aim = FIRST if now is None else now + LEAP if tried[now] < self.limit else now - LEAP + 1
            place = min(levels, key=lambda number: abs(number - aim))
        return place if len(tried) < self.trials and place not in tried else None

    @property
    def trials(self) -> int:
        """Return the most trials of a block."""
        return TRIALS if self.share is None else TWICE


Tried = tuple[float, str]
"""The loss of a model's worst output, and the kind of that output."""
Trial = Callable[[Change], Tried]
"""Measures the model with a single change."""


@dataclass(frozen=True, slots=True)
class Harm:
    """The loss of a model with a single narrowed block.

    Attributes:
        block: its name.
        units: u.
        kind: of the output that decides.
        levels: widths below u, descending.
        losses: one per level, never falling.
        errors: relative squared errors of the consumers' outputs, one per level, never falling.
    """

    block: str
    units: int
    kind: str
    levels: tuple[int, ...]
    losses: tuple[float, ...]
    errors: tuple[float, ...]


def harm_from(entry: Mapping[str, Any]) -> Harm:
    """Convert plain data of a `Harm` back."""
    return Harm(**{**entry, **{name: tuple(entry[name]) for name in ("levels", "losses", "errors")}})


def levels_of(ladder: Ladder, shares: Sequence[float] = SHARES + HALFWAY) -> tuple[int, ...]:
    """Return the widths that a search considers, descending, or those that lose some shares of the units."""
    widths = {ladder.nearest(ladder.units * (1 - share)) for share in shares}
    return tuple(sorted(widths - {ladder.units}, reverse=True))


def harm_of(view: View, ladder: Ladder, narrow: Narrow, trial: Trial, near: Near, cost: Callable[[int], float]) -> Harm:
    """Compute the losses of a block at all levels from the errors of its consumers, and from a few trials.

    The error of the consumers' outputs follows from second moments, at the levels of `SHARES`, and where it begins if
    the first units go for nothing; in between, its root is linear. The loss of the model's outputs is measured at up to
    `TRIALS` levels around a limit, or at two levels from a share on; elsewhere, its power is proportional to the error.
    A width is not tried if a wider one costs as little.

    Args:
        view: the block, with second moments.
        ladder: its widths.
        narrow: what becomes of it at a width.
        trial: measures the model with that change.
        near: where losses matter.
        cost: of the model with the block at a width.
    """
    error = functools.cache(lambda width: narrow.error(view, width))
    levels = _with_knee(levels_of(ladder, SHARES), ladder, error)
    if not levels:
        return Harm(ladder.name, ladder.units, "", (), (), ())
    errors = np.maximum.accumulate(np.clip([error(width) for width in levels], 0.0, 1.0))
    tried: dict[int, float] = {}
    kind = ""
    paying = _paying(levels, ladder.units, cost)
    while (place := near.next(paying, ladder.units, tried)) is not None:
        tried[place], kind = trial(narrow.change(view, levels[place]))
    every = tuple(sorted({*levels_of(ladder), *levels}, reverse=True))
    roots = np.interp(-np.array(every), [-ladder.units, *(-width for width in levels)], [0.0, *np.sqrt(errors)])
    losses = _between(
        roots**2, {every.index(levels[place]): loss for place, loss in tried.items()}, POWERS.get(kind, 1.0)
    )
    return Harm(ladder.name, ladder.units, kind, every, tuple(losses.tolist()), tuple((roots**2).tolist()))


def _with_knee(levels: tuple[int, ...], ladder: Ladder, error: Callable[[int], float]) -> tuple[int, ...]:
    """Return the levels with the least width that has no error, if the first level has none: units may be dead."""
    free = list(itertools.takewhile(lambda width: error(width) <= NOTHING, levels))
    if not free:
        return levels
    low, high = (*levels, 0)[len(free)], free[-1]
    while low < (middle := ladder.nearest((low + high) / 2)) < high:
        low, high = (low, middle) if error(middle) <= NOTHING else (middle, high)
    return tuple(sorted({*levels, high}, reverse=True))


def _paying(levels: Sequence[int], units: int, cost: Callable[[int], float]) -> dict[int, int]:
    """Return the levels that cost less than all wider ones, by number; all if none does, beside others it may."""
    whole = least = cost(units)
    found: dict[int, int] = {}
    for number, width in enumerate(levels):
        now = cost(width)
        if now < least - LEAST * whole:
            least, found[number] = now, width
    return found or dict(enumerate(levels))


def _between(errors: Floats, tried: dict[int, float], power: float) -> Floats:
    """Return the losses at all levels: between trials, log(loss ** power / error) is linear in log(error)."""
    known = sorted(place for place in tried if errors[place] > 0)
    if not known:
        return np.full(len(errors), max(tried.values()))
    tiny = np.finfo(np.float64).tiny
    rates = [np.log(max(tried[place], 1e-9) ** power / errors[place]) for place in known]
    rate = np.interp(np.log(np.maximum(errors, tiny)), np.log(errors[known]), rates)
    found = np.where(errors > 0, (np.exp(rate) * errors) ** (1 / power), 0.0)
    return np.asarray(np.clip(np.maximum.accumulate(found), 0.0, 1.0))


def power_of(harms: Sequence[Harm]) -> float:
    """Return the power of losses that adds up over blocks: that of the kind of output which most blocks harm most."""
    kinds = [POWERS.get(harm.kind, 1.0) for harm in harms if harm.levels]
    return float(np.median(kinds)) if kinds else 1.0
