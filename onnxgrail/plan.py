"""From a ratio to widths: which blocks are narrowed, and how many units each keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from onnxgrail.core import Block, Recipe
from onnxgrail.patterns import Pattern

ALLOCATIONS = ("uniform", "depth", "flap", "global")


def selected(blocks: Sequence[Block], recipe: Recipe) -> tuple[Block, ...]:
    """Blocks of the wanted kinds whose name or one of whose nodes matches `include` and none matches `exclude`.

    Raises:
        UsageError: a pattern is not a regular expression.
    """
    if "grail" not in recipe.method:
        return ()
    wanted = named(recipe)
    return tuple(b for b in blocks if b.kind in recipe.blocks and wanted((b.name, *b.nodes)))


def named(recipe: Recipe) -> Callable[[Sequence[str]], bool]:
    """Tells of a thing's names whether one of them matches `include` and none matches `exclude`.

    Raises:
        UsageError: a pattern is not a regular expression.
    """
    include, exclude = (
        None if text is None else Pattern(option, text)
        for option, text in (("include", recipe.include), ("exclude", recipe.exclude))
    )

    def wanted(names: Sequence[str]) -> bool:
        return (include is None or include.matches(names)) and (exclude is None or not exclude.matches(names))

    return wanted


def unit_share(recipe: Recipe) -> float:
    """Return the share of the units of every block that goes; 0 where a target rules."""
    return (recipe.ratio if recipe.unit_ratio is None else recipe.unit_ratio) or 0.0


def widths(blocks: Sequence[Block], ratio: float, round_to: int) -> dict[str, int]:
    """Block name -> units that stay when the same share of every block goes."""
    return {b.name: kept_units(b.units, b.unit_size, ratio, round_to) for b in blocks}


def kept_units(units: int, unit_size: int, ratio: float, round_to: int) -> int:
    """How many of `units` stay when a share `ratio` goes.

    The width that stays (units times features per unit) is rounded to the nearest multiple of `round_to` where at least
    two such multiples fit; otherwise the number of removed units is rounded.  At least one unit stays.
    """
    if ratio == 0:
        return units
    step = round_to // math.gcd(round_to, unit_size)
    if step > 1 and units >= 2 * step:
        return min(units, max(step, step * math.floor(units * (1 - ratio) / step + 0.5)))
    return max(1, units - math.floor(units * ratio + 0.5))
