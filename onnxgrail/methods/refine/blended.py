"""More images than were given: each fades two of them into one another.

A ResNet on digits with 85 % of its channels gone, and 128 images to learn from, agreed with the original network on
97.1 % of unseen ones after 2400 steps on these alone, and on 97.7 % with blends; of 400 others it got 95.5 and 98.5 %
right.  Moving the images by some pixels as well was now better and now worse, by less than three draws can tell.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from onnxgrail.core import Array, Feed
from onnxgrail.methods.refine.mixed import widened
from onnxgrail.methods.refine.refinement import Refinement

RANK = 4  # sample, channel, height, width, in whatever order


def blended(job: Refinement, times: int) -> Refinement:
    """The same with so many batches of blends behind every one that is learnt from; none where inputs are no images."""
    name = image(job.prepared.batches.first())
    return job if name is None else widened(job, times, functools.partial(faded, name), 2)


def image(feed: Mapping[str, Array]) -> str | None:
    """The one input, of floating point: what belongs to another input, such as a mask, could not be blended."""
    found = [name for name, array in feed.items() if array.ndim == RANK and array.dtype.kind == "f"]
    return found[0] if found and len(feed) == 1 else None


def faded(name: str, feeds: Sequence[Feed], rng: np.random.Generator) -> Feed:
    """Samples of the first of two feeds, each with a share of its own, at most half, of some sample of the other.

    Feeds that are not of one shape give the first.
    """
    ours, theirs = (feed[name] for feed in feeds)
    if ours.shape != theirs.shape:
        return feeds[0]
    rows = len(ours)
    share = rng.uniform(0.0, 0.5, size=(rows, 1, 1, 1)).astype(ours.dtype)
    return {name: ours + share * (theirs[rng.permutation(rows)] - ours)}
