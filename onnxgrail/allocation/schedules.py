"""Schedules of narrowing over blocks: each maps one scalar to real-valued widths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from onnxgrail.allocation.ladders import Ideal, Ladder
from onnxgrail.core import Floats

START = 0.5  # first ratio of the `depth` schedule as a share of the mean


def uniform(ladders: Sequence[Ladder]) -> Ideal:
    """Return the schedule that removes the same share of every block, but see `Ladder.pair`."""
    some = {one.name for one in ladders if not one.pair} or {one.name for one in ladders}
    return lambda s: {one.name: one.units * (1 - s * (one.name in some)) for one in ladders}


def between(one: Ideal, other: Ideal) -> Ideal:
    """Return the schedule of the geometric means of two schedules' widths, for the blocks that both have."""

    def ideal(s: float) -> dict[str, float]:
        first, second = one(s), other(s)
        return {name: math.sqrt(first[name] * second[name]) for name in first if name in second}

    return ideal


def depth_ratios(number: int, mean: float) -> list[float]:
    """Compute ratios that grow with the logarithm of the depth: r_i = r_0 + (r_last − r_0) log(i + 1) / log(n).

    The first is half the mean, or more if the last would otherwise exceed 1; the mean over blocks is `mean`.

    References:
        Ling et al. 2024 (SlimGPT), NeurIPS, arXiv:2412.18110, incremental pruning ratio; r_0 is not from the paper.
    """
    if number < 2:
        return [mean] * number
    rise = [math.log(i + 1) / math.log(number) for i in range(number)]
    average = sum(rise) / number
    last = min(1.0, mean * (START + (1 - START) / average))
    first = (mean - average * last) / (1 - average)
    return [first + (last - first) * share for share in rise]


def depth(ladders: Sequence[Ladder]) -> Ideal:
    """Return the schedule in which later blocks lose more; the ladders must be in order of depth."""

    def ideal(s: float) -> dict[str, float]:
        ratios = depth_ratios(len(ladders), s)
        return {one.name: one.units * (1 - ratio) for one, ratio in zip(ladders, ratios, strict=True)}

    return ideal


def flap(ladders: Sequence[Ladder], scores: Mapping[str, Floats]) -> Ideal:
    """Return the schedule with one threshold for standardized scores of all units of all blocks.

    Heads need no weight of their own here: the budget counts the true cost of units.

    References:
        An et al. 2024 (FLAP), AAAI, arXiv:2312.11983, adaptive structure over layers and modules.
    """
    pool = np.sort(np.concatenate([scores[one.name] for one in ladders]))

    def ideal(s: float) -> dict[str, float]:
        threshold = np.interp(s * (len(pool) - 1), np.arange(len(pool)), pool)
        return {one.name: float((scores[one.name] > threshold).sum()) for one in ladders}

    return ideal
