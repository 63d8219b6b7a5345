"""Augments token sequences: each new sequence has pieces of several sequences, at their original positions.

A few hundred samples are memorized long before a fit has converged: a sentence encoder fitted block by block had an
error of 0.060 on its training data and of 0.096 on held-out data. Targets are outputs of the original network, so more
samples can be made. Two halves are hardly new to such an encoder (0.067, and 0.099 on held-out data), eight pieces are
(0.081 and 0.096), single tokens are too different from text (0.140 and 0.138).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.signature import padding_mask
from onnxgrail.core import Array, Feed
from onnxgrail.methods.refine.refinement import Refinement

PIECES = (4, 8, 16)  # number of pieces of a mixed sequence, at random
FEEDS = 4  # feeds that the pieces are taken from

Join = Callable[[Sequence[Feed], np.random.Generator], Feed]
"""Combines feeds to a new feed; inputs that cannot be combined are those of the first."""


def mixed(job: Refinement, times: int) -> Refinement:
    """Return the job with `times` mixed batches per given batch; unchanged if samples cannot be joined."""
    return widened(job, times, joined, FEEDS) if _tokens(job.prepared.batches.first()) else job


def widened(job: Refinement, times: int, join: Join, count: int) -> Refinement:
    """Return the job with `times` new batches per given batch, each made of that batch and others, `count` in all.

    Held-out batches stay unchanged, and no part of them is used in new batches.

    Args:
        job: the refinement.
        times: new batches per batch that is learned from.
        join: combines feeds.
        count: number of feeds per new batch.
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
    padded = any(padding_mask(feeds[k]()) is not None for k in learnt)  # else the new batches have no padding, either
    masks = (*job.masks, *(padding_mask(make()) if padded else None for make in more))
    return dataclasses.replace(
        job, prepared=dataclasses.replace(job.prepared, batches=wide), masks=masks, real=len(batches)
    )


def joined(feeds: Sequence[Feed], rng: np.random.Generator) -> Feed:
    """Join pieces of random sequences of these feeds, at their original positions.

    Inputs without positions are those of the first feed, and all inputs are if the feeds differ in shape.
    """
    one = feeds[0]
    names = _tokens(one)
    if not names or any(feed[name].shape != one[name].shape for feed in feeds for name in names):
        return one
    rows, length = one[names[0]].shape
    pieces = int(rng.choice(PIECES))
    cuts = rng.integers(1, length, size=(rows, pieces - 1))
    piece = (np.arange(length)[:, None] >= cuts[:, None, :]).sum(-1)  # index of the piece per (row, position)
    mates = [np.arange(rows), *(rng.permutation(rows) for _ in range(pieces - 1))]
    sources = np.stack([p % len(feeds) * rows + mate for p, mate in enumerate(mates)])
    source = sources[piece, np.arange(rows)[:, None]]
    every = {name: np.concatenate([feed[name] for feed in feeds]) for name in names}
    return {**one, **{name: array[source, np.arange(length)] for name, array in every.items()}}


def _maker(join: Join, feeds: Sequence[Callable[[], Feed]], seed: int) -> Callable[[], Feed]:
    return lambda: join([make() for make in feeds], np.random.default_rng(seed))


def _tokens(feed: Mapping[str, Array]) -> list[str]:
    """Return the inputs of shape (sample, position): integers, and others of the same shape.

    Images have none: halves of two digits helped single blocks of a ResNet, but not the whole model. For images there
    is `blended`.
    """
    shapes = [a.shape for a in feed.values() if a.ndim == 2 and a.dtype.kind in "iu" and a.shape[1] > 1]
    return [name for name, a in feed.items() if a.shape == shapes[0]] if shapes else []
