"""Fits widths to a budget by a measured loss: one scalar narrows all blocks, then steps are traded.

Pure functions: blocks are ladders of widths, the cost is a function.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from onnxgrail.allocation.balance import Fit
from onnxgrail.allocation.ladders import Cost, Ideal, Ladder, Widths

Worth = Callable[[str, int, int], float]
"""The value per cost of raising a block from one width to the next; the highest goes first."""

HALVINGS = 40
SLACK = 0.002  # a smaller unused share of the budget is ignored
TRADES, TRADERS = 8, 32  # with more blocks than this, single steps are fine enough


def rounded(ladders: Sequence[Ladder], ideal: Ideal, s: float) -> Widths:
    """Return the nearest allowed widths; the largest at s = 0 and the smallest at s = 1 for any schedule."""
    if s <= 0 or s >= 1:
        return {one.name: one.steps[-1] if s <= 0 else one.steps[0] for one in ladders}
    wanted = ideal(s)
    return {one.name: one.nearest(wanted[one.name]) for one in ladders}


def fitted(ladders: Sequence[Ladder], ideal: Ideal, cost: Cost, limit: float, worth: Worth, harm: Cost) -> Fit:
    """Compute the least narrowing whose cost is at or below `limit`, after rounding.

    The scalar is bisected on rounded widths and their exact cost. Then blocks go up a step as long as the limit holds,
    those with the highest `worth` first, until the unused budget is too small for any step or negligible.

    Args:
        ladders: the blocks.
        ideal: schedule.
        cost: exact cost of widths; grows with every width.
        limit: the budget.
        worth: order in which blocks go up.
        harm: loss that trades of steps between blocks must lower.
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
    widths = spent(ladders, start, cost, limit, worth)
    traders = ladders if len(ladders) <= TRADERS else ()
    for _ in range(TRADES):
        better = traded(traders, widths, cost, limit, harm)
        if better is None:
            break
        widths = spent(ladders, better, cost, limit, worth)
    return Fit(widths, wanted, reached=True)


def spent(ladders: Sequence[Ladder], start: Widths, cost: Cost, limit: float, worth: Worth) -> Widths:
    """Raise widths step by step, the block of highest worth first, until no step fits or `SLACK` is left.

    `start` are the initial widths; other arguments as in `fitted`.
    """
    widths, open_ = dict(start), list(ladders)
    while open_ and cost(widths) < (1 - SLACK) * limit:
        nexts = [(one, up) for one in open_ if (up := one.above(widths[one.name])) is not None]
        order = sorted(nexts, key=lambda item: -worth(item[0].name, widths[item[0].name], item[1]))
        open_ = [one for one, _ in nexts]
        for one, up in order:
            if cost(widths | {one.name: up}) <= limit:
                widths[one.name] = up
                break
            open_ = [other for other in open_ if other is not one]  # the unused budget only shrinks
    return widths


def traded(ladders: Sequence[Ladder], widths: Widths, cost: Cost, limit: float, harm: Cost) -> Widths | None:
    """Return the trade within the limit with the least harm: one block up a step, another down; None if none helps.

    `widths` are the present widths; other arguments as in `fitted`.
    """
    ups = [(one.name, up) for one in ladders if (up := one.above(widths[one.name])) is not None]
    downs = [(one.name, down) for one in ladders if (down := one.below(widths[one.name])) is not None]
    best, least = None, harm(widths)
    for gains, gives in itertools.product(ups, downs):
        pair = widths | dict([gains, gives])
        if gains[0] != gives[0] and harm(pair) < least and cost(pair) <= limit:
            best, least = pair, harm(pair)
    return best
