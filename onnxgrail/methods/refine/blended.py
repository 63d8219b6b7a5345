"""Augments images: each new image is a blend of two.

A ResNet on digits with 85 % of its channels removed, and 128 images to learn from, agreed with the original network on
97.1 % of unseen images after 2400 steps on these alone, and on 97.7 % with blends; of 400 others it classified 95.5 and
98.5 % correctly. Moving the images by a few pixels as well gave better and worse results, within the noise of three
random seeds.
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
    """Return the job with `times` batches of blends per given batch; unchanged if inputs are not images."""
    name = image(job.prepared.batches.first())
    return job if name is None else widened(job, times, functools.partial(faded, name), 2)


def image(feed: Mapping[str, Array]) -> str | None:
    """Return the name of the only input if it is an image, else None; masks, for example, cannot be blended."""
    found = [name for name, array in feed.items() if array.ndim == RANK and array.dtype.kind == "f"]
    return found[0] if found and len(feed) == 1 else None


def faded(name: str, feeds: Sequence[Feed], rng: np.random.Generator) -> Feed:
    """Blend each sample of the first of two feeds with a random sample of the other, by a random share of at most half.

    Returns the first feed if the feeds differ in shape.
    """
    ours, theirs = (feed[name] for feed in feeds)
    if ours.shape != theirs.shape:
        return feeds[0]
    rows = len(ours)
    share = rng.uniform(0.0, 0.5, size=(rows, 1, 1, 1)).astype(ours.dtype)
    return {name: ours + share * (theirs[rng.permutation(rows)] - ours)}
