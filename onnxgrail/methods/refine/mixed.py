"""More samples than were given: sequences of pieces, each from another sequence and from the place that it has there.

Some hundred samples are learnt by heart long before a fit is done with them: a sentence encoder fitted block by block
had an error of 0.060 on what it learnt from and of 0.096 on what it did not.  Targets are what the original network
says, so more samples can be made.  Two halves are hardly new to such an encoder (0.067, and 0.099 where they are from
unseen sequences), eight pieces are (0.081 and 0.096), single tokens are another kind of text (0.140 and 0.138).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.signature import padding_mask
from onnxgrail.core import Array, Feed
from onnxgrail.methods.refine.refinement import Refinement

PIECES = (4, 8, 16)  # of a mixed sequence
FEEDS = 4  # that they are taken from

Join = Callable[[Sequence[Feed], np.random.Generator], Feed]
"""From feeds, the first of which gives all that cannot be joined, to one."""


def mixed(job: Refinement, times: int) -> Refinement:
    """The same with so many mixed batches behind every one that is learnt from; none where samples cannot be joined."""
    return widened(job, times, joined, FEEDS) if _tokens(job.prepared.batches.first()) else job


def widened(job: Refinement, times: int, join: Join, count: int) -> Refinement:
    """The same with so many batches behind every one that is learnt from, each made of that and others, `count` in all.

    Held-out batches stay what they are, and no part of them gets into another.
    """
    feeds, learnt = job.prepared.batches.feeds, job.learnt
    if times < 1 or len(learnt) < 2:
        return job
    rng = np.random.default_rng(job.recipe.seed)
    more: list[Callable[[], Feed]] = []
    for _ in range(times):
        shifts = rng.integers(1, len(learnt), size=count - 1).tolist()
        for number in range(len(learnt)):
            some = [learnt[(number + shift) % len(learnt)] for shift in (0, *shifts)]
            more.append(_maker(join, [feeds[k] for k in some], int(rng.integers(1 << 31))))
    batches = job.prepared.batches
    samples = batches.samples + len(more) * -(-batches.samples // len(batches))
    wide: Batches = dataclasses.replace(batches, feeds=(*feeds, *more), samples=samples)
    padded = any(padding_mask(feeds[k]()) is not None for k in learnt)  # else nothing that is made of them is
    masks = (*job.masks, *(padding_mask(make()) if padded else None for make in more))
    return dataclasses.replace(
        job, prepared=dataclasses.replace(job.prepared, batches=wide), masks=masks, real=len(batches)
    )


def joined(feeds: Sequence[Feed], rng: np.random.Generator) -> Feed:
    """Sequences of which every piece is from another of these feeds, from the place that it has there.

    Inputs without positions, and all where the feeds are not of one shape, are those of the first.
    """
    one = feeds[0]
    names = _tokens(one)
    if not names or any(feed[name].shape != one[name].shape for feed in feeds for name in names):
        return one
    rows, length = one[names[0]].shape
    pieces = int(rng.choice(PIECES))
    cuts = rng.integers(1, length, size=(rows, pieces - 1))
    piece = (np.arange(length)[:, None] >= cuts[:, None, :]).sum(-1)  # of every (row, position)
    mates = [np.arange(rows), *(rng.permutation(rows) for _ in range(pieces - 1))]
    sources = np.stack([p % len(feeds) * rows + mate for p, mate in enumerate(mates)])
    source = sources[piece, np.arange(rows)[:, None]]
    every = {name: np.concatenate([feed[name] for feed in feeds]) for name in names}
    return {**one, **{name: array[source, np.arange(length)] for name, array in every.items()}}


def _maker(join: Join, feeds: Sequence[Callable[[], Feed]], seed: int) -> Callable[[], Feed]:
    return lambda: join([make() for make in feeds], np.random.default_rng(seed))


def _tokens(feed: Mapping[str, Array]) -> list[str]:
    """Inputs of (sample, position): integers, and what has their shape.

    Images have none: halves of two digits helped blocks of a ResNet, and the whole of it came out worse.  For those
    there is `blended`.
    """
    shapes = [a.shape for a in feed.values() if a.ndim == 2 and a.dtype.kind in "iu" and a.shape[1] > 1]
    return [name for name, a in feed.items() if a.shape == shapes[0]] if shapes else []
