"""Widths under a budget: one scalar narrows all blocks, rounding follows, and what is left over is spent.

Pure: blocks are ladders of widths, the cost is a function.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Widths = dict[str, int]
Ideal = Callable[[float], Mapping[str, float]]
"""From s in [0, 1] to real-valued widths: 0 keeps everything, more s keeps less."""
Cost = Callable[[Mapping[str, int]], float]
Worth = Callable[[str, int, int], float]
"""What it is worth that a block goes from one width to the next, per unit of cost: the highest is served first."""

HALVINGS = 40
SLACK = 0.002  # a budget that is spent but for this share is spent
PROMISE = 0.01  # further below the limit than this, blocks also trade steps
TRADES, TRADERS = 8, 32  # with more blocks than this, single steps are fine enough


@dataclass(frozen=True, slots=True)
class Ladder:
    """The widths a block may take, ascending, the last one all of its units."""

    name: str
    steps: tuple[int, ...]

    @property
    def units(self) -> int:
        """All of them."""
        return self.steps[-1]

    def nearest(self, width: float) -> int:
        """The step nearest to a real-valued width; half way the lower one."""
        place = bisect_left(self.steps, width)
        around = self.steps[max(place - 1, 0) : place + 1]
        return min(around, key=lambda step: (abs(step - width), step))

    def above(self, width: int) -> int | None:
        """The next step, None at the top."""
        place = bisect_left(self.steps, width + 1)
        return self.steps[place] if place < len(self.steps) else None

    def below(self, width: int) -> int | None:
        """The step before, None at the bottom."""
        place = bisect_left(self.steps, width)
        return self.steps[place - 1] if place > 0 else None


def ladder(name: str, units: int, unit_size: int, round_to: int) -> Ladder:
    """Multiples of `round_to` features where at least two fit, else every number of units from 1."""
    step = round_to // math.gcd(round_to, unit_size)
    rungs = range(step, units, step) if step > 1 and units >= 2 * step else range(1, units)
    return Ladder(name, (*rungs, units))


@dataclass(frozen=True, slots=True)
class Fit:
    """Widths within a budget, with the real-valued ones they were rounded from; `reached` says whether it is met."""

    widths: Widths
    ideal: Mapping[str, float]
    reached: bool


def rounded(ladders: Sequence[Ladder], ideal: Ideal, s: float) -> Widths:
    """Nearest allowed widths; at 0 and 1 all and as few as possible, whatever the schedule says."""
    if s <= 0 or s >= 1:
        return {one.name: one.steps[-1] if s <= 0 else one.steps[0] for one in ladders}
    wanted = ideal(s)
    return {one.name: one.nearest(wanted[one.name]) for one in ladders}


def fitted(
    ladders: Sequence[Ladder],
    ideal: Ideal,
    cost: Cost,
    limit: float,
    worth: Worth | None = None,
    harm: Cost | None = None,
) -> Fit:
    """The least narrowing whose cost is at or below `limit`, after rounding.

    The scalar is bisected on rounded widths and their exact cost; then blocks go up a step as long as the limit holds,
    those first that rounding took most from (or for which `worth` is highest), until what is left over is too small
    for any step or negligible.

    Args:
        ladders: the blocks.
        ideal: schedule.
        cost: exact cost of widths; grows with every width.
        limit: the budget.
        worth: order in which blocks go up.
        harm: what trades of steps between blocks must lower; without it they get nearer to the limit.
    """
    low, high = 0.0, 1.0
    if cost(rounded(ladders, ideal, low)) <= limit:
        full = rounded(ladders, ideal, low)
        return Fit(full, dict(full), reached=True)
    least = rounded(ladders, ideal, high)
    if cost(least) > limit:
        return Fit(least, dict(least), reached=False)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if cost(rounded(ladders, ideal, middle)) <= limit:
            high = middle
        else:
            low = middle
    start = rounded(ladders, ideal, high)
    wanted = dict(ideal(high)) if high < 1 else {name: float(width) for name, width in start.items()}

    def deficit(name: str, width: int, _: int) -> float:
        return (wanted[name] - width) / units[name]

    units = {one.name: one.units for one in ladders}
    widths = spent(ladders, start, cost, limit, worth or deficit)
    traders = ladders if len(ladders) <= TRADERS else ()
    for _ in range(TRADES):
        if harm is None and cost(widths) >= (1 - PROMISE) * limit:
            break
        better = traded(traders, widths, cost, limit, harm)
        if better is None:
            break
        widths = spent(ladders, better, cost, limit, worth or deficit)
    return Fit(widths, wanted, reached=True)


def spent(ladders: Sequence[Ladder], start: Widths, cost: Cost, limit: float, worth: Worth) -> Widths:
    """Widths that go up step by step, the worthiest block first, until none fits any more or `SLACK` is left."""
    widths, open_ = dict(start), list(ladders)
    while open_ and cost(widths) < (1 - SLACK) * limit:
        nexts = [(one, up) for one in open_ if (up := one.above(widths[one.name])) is not None]
        order = sorted(nexts, key=lambda item: -worth(item[0].name, widths[item[0].name], item[1]))
        open_ = [one for one, _ in nexts]
        for one, up in order:
            if cost(widths | {one.name: up}) <= limit:
                widths[one.name] = up
                break
            open_ = [other for other in open_ if other is not one]  # the rest of the budget only shrinks
    return widths


def traded(
    ladders: Sequence[Ladder], widths: Widths, cost: Cost, limit: float, harm: Cost | None = None
) -> Widths | None:
    """The best trade within the limit: one block goes up a step and another down; None where none helps.

    Best is what does least harm, or what comes nearest to the limit.
    """
    ups = [(one.name, up) for one in ladders if (up := one.above(widths[one.name])) is not None]
    downs = [(one.name, down) for one in ladders if (down := one.below(widths[one.name])) is not None]
    score = harm or (lambda some: -cost(some))
    best, least = None, score(widths)
    for gains, gives in itertools.product(ups, downs):
        pair = widths | dict([gains, gives])
        if gains[0] != gives[0] and score(pair) < least and cost(pair) <= limit:
            best, least = pair, score(pair)
    return best
