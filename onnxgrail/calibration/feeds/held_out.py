"""Selection of held-out samples, so that the result is judged on inputs that no fit has seen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrail.core import Ints
from onnxgrail.errors import DataError

SHARE, LEAST, MOST = 5, 8, 256  # one of five samples, within these bounds
ENOUGH = 32  # samples; with fewer, none are held out
STREAM = 1  # separates these random numbers from those of --samples, which share the seed


def share_of(samples: int, batch: int = 1) -> int:
    """Return the number of held-out samples for a fit to `samples` samples, in whole batches of a fixed size."""
    share = min(MOST, max(LEAST, round(samples / SHARE)))
    return max(1, round(share / batch)) * batch


def spare(there: int, asked: int | None, batch: int = 1) -> int:
    """Return how many samples to hold back if the user gives no number.

    Args:
        there: number of samples in the data.
        asked: number of samples to fit to, None for all. If the data hold more, the others are held back.
        batch: the batch size that the model prescribes.

    Returns:
        A number of samples in whole batches; 0 if there are too few.
    """
    fitted = there if asked is None else min(asked, there)
    share = share_of(fitted, batch)
    if there >= fitted + share:
        return share
    if there < ENOUGH:
        return 0
    return min(share // batch, there // batch // 3) * batch


def spare_feeds(sizes: Sequence[int], asked: int | None) -> int:
    """Return how many feeds to hold back if feeds can only be held back whole.

    Args:
        sizes: number of samples of each feed.
        asked: number of samples to fit to, None for all.
    """
    there = sum(sizes)
    fitted = there if asked is None else min(asked, there)
    share = share_of(fitted)
    if there < min(ENOUGH, fitted + share):
        return 0
    return min(max(1, round(share * len(sizes) / there)), len(sizes) // 3)


def positions(count: int, held: int, seed: int, refusal: str) -> Ints:
    """Return random positions of held-out items among `count` items: one from each of `held` equal stretches.

    Stretches suit data sorted by class; random positions within them suit data that cycle through the classes.

    Args:
        count: number of items.
        held: number of items to hold out.
        seed: random seed.
        refusal: text of the error.

    Raises:
        DataError: no items would be left to fit to.
    """
    if held >= count:
        raise DataError(refusal, hint="Hold out fewer, or name other data: --held-out DATA")
    edges = np.arange(held + 1) * count // held
    return np.random.default_rng((seed, STREAM)).integers(edges[:-1], edges[1:])


def chosen_of(total: int, samples: int | None, seed: int) -> Ints:
    """Return the numbers of the used samples: all, or a random sample from each of `samples` equal stretches."""
    if samples is None or samples >= total:
        return np.arange(total)
    edges = np.arange(samples + 1) * total // samples
    return np.random.default_rng(seed).integers(edges[:-1], edges[1:])
