"""The widths that a block may take: multiples of `--round-to` if they fit, finer steps if they do not."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxgrail.core import Block

Widths = dict[str, int]
Ideal = Callable[[float], Mapping[str, float]]
"""A schedule: s in [0, 1] to real-valued widths; s = 0 keeps everything, larger s keep less."""
Cost = Callable[[Mapping[str, int]], float]

LEAST, MOST = 0.5, 1.25  # bounds of rounding, as multiples of the requested loss of a block
FEWEST = 4  # least steps of a ladder, if there are that many units
EDGE = 1e-9
WIDEST = 2**16  # largest step in units: a larger step leaves a block only one width


@dataclass(frozen=True, slots=True)
class Ladder:
    """The widths a block may take.

    Attributes:
        name: of the block.
        units: of the full block.
        step: widths are multiples of it; its divisors are used if it is too coarse.
        pair: True for channels between two convolutions that were one: equal shares of all blocks leave them, since
            two cost as much as one, or more, until many of their channels go.
    """

    name: str
    units: int
    step: int = 1
    pair: bool = False

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the allowed widths, ascending, the last one all units: multiples of the coarsest fitting divisor."""
        return _steps(self.units, self.step)

    def within(self, width: int, asked: float, most: float = MOST) -> bool:
        """Return True if a width takes no more units than `most` times the units asked for."""
        return most == math.inf or self.units - width <= most * asked * (1 + EDGE)

    def grid(self, width: float) -> int:
        """Return the coarsest divisor of the step with a multiple that loses about as much as a width, 1 if none."""
        return self._rounded(width)[0]

    def nearest(self, width: float) -> int:
        """Round a width to a multiple of `grid(width)`, ties to the lower one; widths in `steps` stay."""
        place = bisect_left(self.steps, width)
        exact = place < len(self.steps) and self.steps[place] == width
        return self.steps[place] if exact else self._rounded(width)[1]

    def _rounded(self, width: float) -> tuple[int, int]:
        asked = self.units - width
        if asked <= EDGE:
            return 1, self.units
        for grid in divisors(self.step):
            lower = grid * math.floor(width / grid + EDGE)
            around = [k for k in (lower, min(lower + grid, self.units)) if k > 0 and self.within(k, asked)]
            around = [k for k in around if self.units - k >= LEAST * asked * (1 - EDGE)]
            if around:
                return grid, min(around, key=lambda k: (abs(k - width), k))
        return 1, max(1, math.ceil(width - EDGE))


def ladder(name: str, units: int, unit_size: int, round_to: int) -> Ladder:
    """Return the ladder of a block.

    Args:
        name: of the block.
        units: of the full block.
        unit_size: features per unit.
        round_to: wanted multiple of the width in features.
    """
    return Ladder(name, units, round_to // math.gcd(round_to, unit_size))


def ladders_of(blocks: Sequence[Block], round_to: int) -> tuple[Ladder, ...]:
    """Return the ladders of blocks, in order of depth."""
    ordered = sorted(blocks, key=lambda b: sum(b.span))
    return tuple(replace(ladder(b.name, b.units, b.unit_size, round_to), pair=b.kind == "rank") for b in ordered)


@functools.cache
def divisors(step: int) -> tuple[int, ...]:
    """Return all divisors, the largest first."""
    return tuple(d for d in range(min(step, WIDEST), 0, -1) if step % d == 0)


@functools.cache
def _steps(units: int, step: int) -> tuple[int, ...]:
    grid = next((d for d in divisors(step) if FEWEST * d <= units), 1)
    return (*range(grid, units, grid), units)
