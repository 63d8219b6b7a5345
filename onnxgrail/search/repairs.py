"""Corrects the losses of single blocks for the fits that follow, which repair most of what early blocks lose.

The loss of a block alone is measured without fits of other layers. With `--compensate best`, all layers downstream are
fitted to the dense network afterwards: in a residual network they take away nine tenths of what the first blocks lose
and nothing of what the last one does. So a few blocks are judged with and without these fits, on a part of the data.
Pure functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onnxgrail.core import Block
from onnxgrail.search.harms import Harm, Near

WIDE = 0.5  # part of a graph from which a stream runs alongside most of its layers
AIM = 2.0  # times the limit: loss at which a block is tried
LEAST, MOST = 0.01, 1.0  # bounds of the share of the loss that fits leave
Share = Callable[[str, int], float]
"""Returns the loss after fits over the loss without, with a block at a width and all others whole."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The blocks that are tried with fits.

    Attributes:
        count: most blocks to try.
        apart: blocks that run alongside all others; they are tried first, and say nothing about others.
        like: block name to that of those which it is like, '' for blocks that are not named; of blocks of another sort
            at the same depth, fits may leave quite another share.
    """

    count: int
    apart: frozenset[str] = frozenset()
    like: Mapping[str, str] = field(default_factory=dict)


def runs_alongside(block: Block, nodes: int) -> bool:
    """Return True if a block in a basis of its own is no layer among others: it runs alongside most of them.

    Args:
        block: the block.
        nodes: number of nodes of the graph.
    """
    begin, end = block.span
    return block.kind == "embedding" or (bool(block.ranked) and block.kind == "stream" and end - begin > WIDE * nodes)


def repaired(harms: Sequence[Harm], plan: Plan, power: float, near: Near, left: Share) -> list[Harm]:
    """Return the losses of all blocks that are left after fits.

    The share that fits leave is measured for blocks that are spread evenly over the depth, and interpolated for the
    others like them. It holds where a block was tried; see `_scaled` for other widths.

    Args:
        harms: losses of all blocks alone, in order of depth.
        plan: the blocks to try.
        power: see `harms.POWERS`.
        near: where losses matter.
        left: see `Share`.
    """
    found = list(harms)

    def share(number: int) -> float:
        return float(np.clip(left(harms[number].block, harms[number].levels[places[number]]), LEAST, MOST))

    able = [number for number, harm in enumerate(harms) if harm.levels and harm.losses[-1] > 0]
    places = {number: _place(harms[number], near) for number in able}
    wide = [number for number in able if harms[number].block in plan.apart][: plan.count]
    shares = {number: share(number) for number in wide}
    groups: dict[str, list[int]] = defaultdict(list)
    for number in able:
        if harms[number].block not in plan.apart:
            groups[plan.like.get(harms[number].block, "")].append(number)
    counts = dealt(plan.count - len(wide), [len(deep) for deep in groups.values()])
    for deep, count in zip(groups.values(), counts, strict=True):
        chosen = [deep[place] for place in np.unique(np.linspace(0, len(deep) - 1, count).round().astype(int))]
        if chosen:
            logs = np.interp(deep, chosen, np.log([share(number) for number in chosen]))
            shares |= dict(zip(deep, np.exp(logs).tolist(), strict=True))
    for number, one in shares.items():
        found[number] = _scaled(harms[number], one, power, places[number])
    return found


def dealt(count: int, sizes: Sequence[int]) -> list[int]:
    """Deal tries to groups of some sizes: one to each if there are enough, and the rest by size."""
    given = [0] * len(sizes)
    for _ in range(min(count, sum(sizes))):
        open_ones = [place for place, size in enumerate(sizes) if given[place] < size]
        given[max(open_ones, key=lambda place: (not given[place], sizes[place] / (given[place] + 1)))] += 1
    return given


def _place(harm: Harm, near: Near) -> int:
    """Return the level at which a block is tried: the last one that is not too narrow, with a loss near the limit."""
    pairs = zip(harm.levels, harm.losses, strict=True)
    return max(sum(level >= near.least * harm.units and loss <= AIM * near.limit for level, loss in pairs) - 1, 0)


def _scaled(harm: Harm, share: float, power: float, place: int) -> Harm:
    """Return the losses of a block times `share` at a level.

    Without repair they are as steep as the measured losses; the more is repaired, the more they follow the errors.
    """
    if harm.errors[place] <= 0 or harm.losses[place] <= 0:
        return replace(harm, losses=tuple(share * loss for loss in harm.losses))
    measured = np.asarray(harm.losses) / harm.losses[place]
    followed = (np.asarray(harm.errors) / harm.errors[place]) ** (1 / power)
    losses = share * harm.losses[place] * measured**share * followed ** (1 - share)
    return replace(harm, losses=tuple(np.clip(losses, 0.0, 1.0).tolist()))
