"""Corrects the losses of single blocks for the fits that follow, which repair most of what early blocks lose.

The loss of a block alone is measured without fits of other layers. With `--compensate best`, all layers downstream are
fitted to the dense network afterwards: in a residual network they take away nine tenths of what the first blocks lose
and nothing of what the last one does. So a few blocks are judged with and without these fits, on a part of the data.
Pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from onnxgrail.search.harms import Harm, Near

AIM = 2.0  # times the limit: loss at which a block is tried
LEAST, MOST = 0.01, 1.0  # bounds of the share of the loss that fits leave
Share = Callable[[str, int], float]
"""Returns the loss after fits over the loss without, with a block at a width and all others whole."""


def repaired(harms: Sequence[Harm], count: int, power: float, near: Near, left: Share) -> list[Harm]:
    """Return the losses of all blocks that are left after fits.

    The share that fits leave is measured for blocks that are spread evenly over the depth, and interpolated for the
    others. It holds where a block was tried; see `_scaled` for other widths.

    Args:
        harms: losses of all blocks alone, in order of depth.
        count: most blocks to measure.
        power: see `harms.POWERS`.
        near: where losses matter.
        left: see `Share`.
    """
    able = [number for number, harm in enumerate(harms) if harm.levels and harm.losses[-1] > 0]
    found = list(harms)
    if not able or not count:
        return found
    spread = np.unique(np.linspace(0, len(able) - 1, min(count, len(able))).round().astype(int))
    chosen = [able[place] for place in spread]
    shares = [left(harms[n].block, harms[n].levels[_place(harms[n], near)]) for n in chosen]
    logs = np.interp(able, chosen, np.log(np.clip(shares, LEAST, MOST)))
    for number, log in zip(able, logs, strict=True):
        found[number] = _scaled(harms[number], float(np.exp(log)), power, _place(harms[number], near))
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
