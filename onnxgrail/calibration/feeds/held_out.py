"""Which samples are held back from every fit, so that the result is judged on inputs that no fit has seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrail.core import Ints
from onnxgrail.errors import DataError

SHARE, LEAST, MOST = 5, 8, 256  # one sample in five, within these bounds
ENOUGH = 32  # samples; of fewer, none can be spared
STREAM = 1  # keeps this draw apart from the one of --samples, which has the same seed


def share_of(samples: int, batch: int = 1) -> int:
    """Return how many samples judge a fit to so many, in whole batches of a fixed size."""
    share = min(MOST, max(LEAST, round(samples / SHARE)))
    return max(1, round(share / batch)) * batch


def spare(there: int, asked: int | None, batch: int = 1) -> int:
    """Return how many samples to hold back where the user did not say.

    Args:
        there: samples that the data hold.
        asked: samples to fit to, None for all. Where the data hold more, the others judge.
        batch: the batch size that the model prescribes.

    Returns:
        A number of samples in whole batches; 0 where the fit cannot do without them.
    """
    fitted = there if asked is None else min(asked, there)
    share = share_of(fitted, batch)
    if there >= fitted + share:
        return share
    if there < ENOUGH:
        return 0
    return min(share // batch, there // batch // 3) * batch


def spare_feeds(sizes: Sequence[int], asked: int | None) -> int:
    """Return the same in feeds that can only be held back whole, from the number of samples of each."""
    there = sum(sizes)
    fitted = there if asked is None else min(asked, there)
    share = share_of(fitted)
    if there < min(ENOUGH, fitted + share):
        return 0
    return min(max(1, round(share * len(sizes) / there)), len(sizes) // 3)


def positions(count: int, held: int, seed: int, refusal: str) -> Ints:
    """Return positions of the held ones among `count` things: one from each of equal stretches, drawn at random.

    Stretches serve data sorted by class, and the draw within them serves data that cycle through the classes.

    Raises:
        DataError: nothing would be left to fit to.
    """
    if held >= count:
        raise DataError(refusal, hint="Hold out fewer, or name other data: --held-out DATA")
    edges = np.arange(held + 1) * count // held
    return np.random.default_rng((seed, STREAM)).integers(edges[:-1], edges[1:])


def chosen_of(total: int, samples: int | None, seed: int) -> Ints:
    """Return the numbers of the samples that are used: all, or one from each of as many equal stretches."""
    if samples is None or samples >= total:
        return np.arange(total)
    edges = np.arange(samples + 1) * total // samples
    return np.random.default_rng(seed).integers(edges[:-1], edges[1:])
