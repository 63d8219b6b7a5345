"""Rounds widths, balanced over the blocks, so that all together lose the requested amount.

Pure functions: blocks are ladders of widths, the cost is a function.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnxgrail.allocation import schedules
from onnxgrail.allocation.ladders import EDGE, LEAST, MOST, Cost, Ideal, Ladder, Widths, divisors, ladders_of
from onnxgrail.core import Block

BEYOND = (1.5, 2.0, math.inf)  # limits to try if single units are too coarse for `MOST`
HALVINGS = 20
DITHERS = 16  # offsets over which a cost is averaged to interpolate between whole units
EVALUATIONS = 256  # most blocks times offsets
TRIES = 8  # most blocks that fail to go up a step, and most trades of units
COARSE = 1  # divisors below the step that a narrow block may take from the start; many kernels are slow with finer ones
TRADERS = 32  # with more blocks than this, single units are fine enough
PROMISE = 0.01  # if the cost is below the limit by more than this share, finer steps are tried


Moves = Sequence[tuple[str, int]]
"""Blocks and the widths that they go down to, in this order."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Widths within a budget, and the real-valued widths before rounding; `reached` is True if the budget is met."""

    widths: Widths
    ideal: Mapping[str, float]
    reached: bool


def balanced(ladders: Sequence[Ladder], ideal: Ideal, cost: Cost, limit: float, *, strict: bool = True) -> Fit:
    """Return the least narrowing whose cost is at or below `limit`.

    The scalar at which real-valued widths cost exactly the limit defines what each block should lose. Then blocks go
    down step by step, always the block that has lost the smallest share of that, until the limit is met. No block loses
    more than `MOST` times what it should; steps are as coarse as that allows, and finer if the limit is not met
    otherwise. Only if single units are too coarse for both does a block lose more.

    Args:
        ladders: the blocks.
        ideal: schedule.
        cost: exact cost of widths; grows with every width.
        limit: the budget.
        strict: True if the limit must hold. Else single units that are too coarse come as near to it as they can.
    """
    full: Widths = {one.name: one.units for one in ladders}
    if cost(full) <= limit:
        return Fit(full, dict(full), reached=True)
    least = dict.fromkeys(full, 1)
    if cost(least) > limit:
        return Fit(least, dict(least), reached=False)
    wanted = dict(ideal(_scalar(ladders, ideal, cost, limit)))
    asked = {one.name: max(one.units - wanted[one.name], 0.0) for one in ladders}
    short, met = full, full
    for most in (MOST, *BEYOND):
        if most > MOST and not strict and cost(met) <= (1 + PROMISE) * limit:
            break
        for moves in _rounds(ladders, wanted, asked, most):
            short, met = _around(met, moves, cost, limit)
            if cost(met) <= limit:
                break
        if cost(met) <= limit:
            break
    met = _raised(ladders, met, asked, cost, limit)
    for _ in range(TRIES):
        traded = _traded(ladders, met, asked, cost, limit)
        if traded is met:
            break
        met = _raised(ladders, traded, asked, cost, limit)
    coarse = not strict and most > MOST and cost(short) - limit < limit - cost(met)
    return Fit(short if coarse else met, wanted, reached=True)


def by_units(blocks: Sequence[Block], share: float, round_to: int) -> Widths:
    """Return widths at which every block loses the same share of its units.

    Blocks are rounded one by one. If `round_to` makes steps larger than a unit, blocks go up or down a step so that
    together they lose the share.

    Args:
        blocks: the blocks.
        share: of the units, from 0 to 1.
        round_to: multiple of the width in features.
    """
    ladders = ladders_of(blocks, round_to)
    widths = {one.name: one.nearest(one.units * (1 - share)) for one in ladders}
    coarse = [one for one in ladders if one.step > 1]
    if coarse and share > 0:
        limit = sum(one.units for one in coarse) * (1 - share) + EDGE
        fit = balanced(coarse, schedules.uniform(coarse), lambda some: sum(some.values()), limit, strict=False)
        widths |= fit.widths
    return widths


def _scalar(ladders: Sequence[Ladder], ideal: Ideal, cost: Cost, limit: float) -> float:
    """Return the scalar at which real-valued widths cost the limit.

    Between whole units a cost is the mean over widths rounded down after adding several offsets.
    """
    count = max(1, min(DITHERS, EVALUATIONS // len(ladders)))
    offsets = [(n + 0.5) / count for n in range(count)]

    def real(s: float) -> float:
        wanted = ideal(s)
        return sum(cost({n: max(0, math.floor(w + offset)) for n, w in wanted.items()}) for offset in offsets) / count

    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if real(middle) <= limit else (middle, high)
    return high


def _rounds(
    ladders: Sequence[Ladder], wanted: Mapping[str, float], asked: Mapping[str, float], most: float
) -> Iterator[Moves]:
    """Yield rounds of steps down that take at most `most` times what blocks should lose, coarse steps first.

    Within a round, steps are ordered by the lost share of what the block should lose; ties go to the last block first.
    """
    for finer in range(max(len(divisors(one.step)) for one in ladders)):
        moves = []
        for depth, one in enumerate(ladders):
            grids = divisors(one.step)
            first = min(grids.index(one.grid(wanted[one.name])), COARSE)
            for grid in grids[max(first, finer) :][:1]:
                for width in range(grid * ((one.units - 1) // grid), 0, -grid):
                    if not one.within(width, asked[one.name], most):
                        break
                    moves.append((_lost(one, width, asked), -depth, one.name, width))
        yield [(name, width) for _, _, name, width in sorted(moves)]


def _lost(one: Ladder, width: int, asked: Mapping[str, float]) -> float:
    """Return the units that a width takes, as a share of those requested; infinite for blocks that should lose none."""
    return (one.units - width) / asked[one.name] if asked[one.name] > EDGE else math.inf


def _moved(widths: Widths, moves: Moves) -> Widths:
    """Return widths after some steps down; a step to a width that is not smaller has no effect."""
    moved = dict(widths)
    for name, width in moves:
        moved[name] = min(moved[name], width)
    return moved


def _around(widths: Widths, moves: Moves, cost: Cost, limit: float) -> tuple[Widths, Widths]:
    """Return the widths before and after the step that meets the limit; after all steps if none does."""
    number = bisect_left(range(len(moves)), True, key=lambda n: cost(_moved(widths, moves[:n])) <= limit)
    return _moved(widths, moves[: max(number - 1, 0)]), _moved(widths, moves[:number])


def _raised(ladders: Sequence[Ladder], widths: Widths, asked: Mapping[str, float], cost: Cost, limit: float) -> Widths:
    """Raise widths again within the limit: coarse steps first, of the blocks that lost most first."""
    raised = dict(widths)
    narrow = [one for one in ladders if widths[one.name] < one.units]
    for finer in range(max((len(divisors(one.step)) for one in narrow), default=0)):
        moves = []
        for one in narrow:
            grid = (divisors(one.step)[finer : finer + 1] or (1,))[0]
            top = math.floor(one.units - LEAST * asked[one.name] + EDGE)
            ups = range(grid * (raised[one.name] // grid + 1), top + 1, grid)
            moves += [(-_lost(one, up, asked), one.name, up) for up in ups]
        steps: Moves = [(name, up) for _, name, up in sorted(moves)]
        for _ in range(TRIES):
            if not steps or cost(raised) >= (1 - PROMISE) * limit:
                break
            fits = bisect_left(range(len(steps)), True, key=lambda n: cost(raised | dict(steps[: n + 1])) > limit)
            raised |= dict(steps[:fits])
            steps = [step for step in steps[fits + 1 :] if step[0] != steps[fits][0]]
    return raised


def _traded(ladders: Sequence[Ladder], widths: Widths, asked: Mapping[str, float], cost: Cost, limit: float) -> Widths:
    """Trade one unit between two blocks, if the cost is still far below the limit; take the pair that comes nearest."""
    best = widths
    if len(ladders) > TRADERS or cost(best) >= (1 - PROMISE) * limit:
        return best
    for up, down in itertools.permutations(ladders, 2):
        more, less = widths[up.name] + 1, widths[down.name] - 1
        if more <= up.units and less > 0 and down.within(less, asked[down.name]):
            pair = widths | {up.name: more, down.name: less}
            best = pair if cost(best) < cost(pair) <= limit else best
    return best
