"""Feeds with copies of samples, or with samples that follow each other: frames of a scene, windows of a recording.

A sample says little about a fit to a sample like it.  So feeds that are alike stay on one side where a part of the data
judges what is fitted to the rest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.judging import digests, judging, rows_of
from onnxgrail.core import Feed, Floats
from onnxgrail.errors import DataError

VALUES = 256  # of each array of a sample, by which samples are compared
NEAR = 0.25  # distance to the feed before, as a share of that to others, up to which samples follow each other
OTHERS = 4  # other feeds with which each is compared
FEWEST = 8  # feeds that can show it
SOME = 25  # percentile of the distances: not all samples have to follow each other
FOLLOW = "many samples are like the ones before them, as frames of a scene are: others may lose more"
COPIES = "{copies:,} of {samples:,} samples are copies of others, which say nothing more"
LEAK = "; {leak:,} of those that judge are copies of samples that fits have seen: others may lose more"

Group = Sequence[int]
"""Numbers of feeds that belong together, in order."""
Sketch = Sequence[Floats]
"""Some values of the samples of a feed, (samples, values) per array of numbers."""


def unmixed(batches: Batches) -> Batches:
    """Return the feeds in an order in which those that are alike are on one side, with a note if some are.

    Raises:
        DataError: all samples are the same.
    """
    seen, sketches = [], []
    for feed in batches:
        seen.append(digests(feed))
        sketches.append(sketch(feed))
    samples, distinct = sum(map(len, seen)), len({digest for some in seen for digest in some})
    if distinct == 1 < samples:
        raise DataError(
            f"all {samples:,} samples of {batches.source} are the same: they say nothing about others",
            hint="Give samples that differ",
        )
    links, copies = following(sketches), samples - distinct
    if not links and not copies:
        return batches
    groups = _joined(len(seen), [*((n - 1, n) for n in links), *_with_copies(seen)])
    order = ordered(groups, judging(batches))
    notes = [FOLLOW] if links else []
    if copies:
        judge = {order[place] for place in judging(batches)}
        fitted = {digest for n, some in enumerate(seen) if n not in judge for digest in some}
        leak = sum(digest in fitted for n in judge for digest in seen[n])
        notes.append(COPIES.format(copies=copies, samples=samples) + (LEAK.format(leak=leak) if leak else ""))
    return replace(batches, feeds=tuple(batches.feeds[n] for n in order), notes=(*batches.notes, *notes))


def following(sketches: Sequence[Sketch]) -> list[int]:
    """Return the numbers of the feeds whose samples are much nearer to the feed before than to others.

    In data without an order there are none, whatever the number of dimensions: all distances are alike.
    """
    count = len(sketches)
    if count < FEWEST:
        return []
    before = np.array([_distance(sketches[n], sketches[n - 1]) for n in range(1, count)])
    steps = [2 + place * (count - 3) // OTHERS for place in range(OTHERS)]
    others = np.array(
        [[_distance(sketches[n], sketches[(n + step) % count]) for step in steps] for n in range(1, count)]
    )
    near, far = (np.percentile(distances, SOME, method="nearest") for distances in (before, others))
    if near >= NEAR * far:
        return []
    return (np.flatnonzero(before < NEAR * np.median(others, axis=1)) + 1).tolist()


def sketch(feed: Feed) -> Sketch:
    """Return some values of all samples of a feed."""
    return [np.asarray(part, np.float64) for part in rows_of(feed, VALUES) if part.dtype.kind in "fiub"]


def _distance(some: Sketch, others: Sketch) -> float:
    """Return the median distance of samples to the nearest one of other samples; infinite if shapes differ."""
    total = np.zeros((len(some[0]), len(others[0]))) if some else np.full((1, 1), np.inf)
    for one, other in zip(some, others, strict=True):
        if one.shape[1] != other.shape[1]:
            return math.inf
        scale = max(float(np.std(one)), float(np.std(other)), 1e-12)
        total += np.square((one[:, None] - other[None]) / scale).mean(axis=2)
    return float(np.sqrt(np.median(total.min(axis=1))))


def _with_copies(seen: Iterable[Iterable[bytes]]) -> list[tuple[int, int]]:
    """Return pairs of feeds that have a sample in common."""
    feeds: dict[bytes, int] = {}
    return [(feeds.setdefault(digest, n), n) for n, some in enumerate(seen) for digest in some]


def _joined(count: int, pairs: Sequence[tuple[int, int]]) -> list[Group]:
    """Return groups of feeds that pairs join."""
    from scipy.sparse import coo_array  # slow to import, and only data with such feeds need it
    from scipy.sparse.csgraph import connected_components

    links = coo_array((np.ones(len(pairs)), np.transpose(pairs)), shape=(count, count))
    found: dict[int, list[int]] = defaultdict(list)
    for n, label in enumerate(connected_components(links, directed=False)[1].tolist()):
        found[label].append(n)
    return list(found.values())


def ordered(groups: Sequence[Group], places: Sequence[int]) -> list[int]:
    """Return an order of feeds in which groups are at places that judge, or at others.

    Groups that are too large for that are cut. If the numbers do not fit, a few feeds are on the other side.

    Args:
        groups: the feeds.
        places: those that judge.
    """
    count = sum(map(len, groups))
    most = max(1, min(len(places), count - len(places)) // 2)
    pieces = [group[n : n + most] for group in groups for n in range(0, len(group), most)]
    judge: list[int] = []
    fitted: list[int] = []
    for piece in pieces:
        share = (len(judge) + len(fitted) + len(piece)) / count
        (judge if len(judge) + len(piece) <= share * len(places) + 0.5 else fitted).extend(piece)
    while len(judge) < len(places):
        judge.append(fitted.pop())
    fitted, judge = [*fitted, *judge[len(places) :]], judge[: len(places)]
    sides = dict(zip(places, judge, strict=True))
    rest = iter(fitted)
    return [sides[place] if place in sides else next(rest) for place in range(count)]
