"""Corrects the losses of single blocks for the fits that follow, which repair most of what early blocks lose.

The loss of a block alone is measured without fits of other layers. With `--compensate best`, all layers downstream are
fitted to the dense network afterwards: in a residual network they take away nine tenths of what the first blocks lose
and nothing of what the last one does. So a few blocks are judged with and without these fits, on a part of the data.
Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    """

    count: int
    apart: frozenset[str] = frozenset()


def runs_alongside(block: Block, nodes: int) -> bool:
    """Return True if a block in a basis of its own is no layer among others: it runs alongside most of them.

    Args:
        block: the block.
        nodes: number of nodes of the graph.
    """
    begin, end = block.span
    return bool(block.ranked) and (block.kind != "stream" or end - begin > WIDE * nodes)


def repaired(harms: Sequence[Harm], plan: Plan, power: float, near: Near, left: Share) -> list[Harm]:
    """Return the losses of all blocks that are left after fits.

    The share that fits leave is measured for blocks that are spread evenly over the depth, and interpolated for the
    others. It holds where a block was tried; see `_scaled` for other widths.

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
    deep = [number for number in able if harms[number].block not in plan.apart]
    shares = {number: share(number) for number in wide}
    spread = np.linspace(0, len(deep) - 1, min(plan.count - len(wide), len(deep))).round().astype(int)
    chosen = [deep[place] for place in np.unique(spread)]
    if chosen:
        logs = np.interp(deep, chosen, np.log([share(number) for number in chosen]))
        shares |= dict(zip(deep, np.exp(logs).tolist(), strict=True))
    for number, one in shares.items():
        found[number] = _scaled(harms[number], one, power, places[number])
    return found


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
