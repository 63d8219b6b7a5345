"""The samples that judge a result: the user's request for them, or else a few calibration samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.data import Source
from onnxgrail.calibration.feeds.parts import content
from onnxgrail.core import Array, Feed, Floats
from onnxgrail.errors import DataError, UsageError
from onnxgrail.machine.amounts import whole

AUTO = "auto"  # default of --held-out: a fifth of the data, see `held_out`
CHECKED_SAMPLES = 64  # limit of calibration samples, which say little because fits have seen them
MANY, EACH = 320, 5  # samples from which one feed in so many judges a loss; fewer samples judge by halves
HALVES = 2  # feeds of which one judges fits to the other, if samples are fewer
GATE = 5  # one batch in so many chooses the weights of a refinement
BARE = 0.1  # share of the average content that a feed without any counts for
LOOKED = 4096  # values per array by which two samples are found to be the same
CHECKED_SHARE, CHECKED_LEAST = 4, 16  # one sample in so many, so that the check costs little beside the calibration


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """Feeds of samples that judge the result; nothing is fitted to them.

    Attributes:
        asked: the user's request: a number, the name of data, or `auto`.
        batches: the feeds.
        own: True if they come from other data than the calibration data.
        seen: number of samples that are calibration samples nevertheless.
    """

    asked: str
    batches: Batches
    own: bool
    seen: int = 0


def asked_for(held_out: Any) -> tuple[int | None, Source | None]:
    """Return the number of samples to hold back, None if the data decide, and other data that judge instead.

    Raises:
        UsageError: the value is neither a number of samples nor data.
    """
    text = held_out.strip().lower() if isinstance(held_out, str) else None
    if held_out is None or text == AUTO:
        return None, None
    if text == "none":
        return 0, None
    count = int(held_out) if isinstance(held_out, np.integer) else held_out if text is None else whole(text)
    if not isinstance(count, int | float):
        return 0, held_out
    if isinstance(count, bool | float) or count < 0:
        raise UsageError(f"--held-out must be a number of samples, 0 or more, or data, got {held_out!r}")
    return count, None


def words_of(held_out: Any) -> str:
    """Return the text of the user's request, for reports in which no samples were held back."""
    return AUTO if asked_for(held_out)[0] is None else "0"


def apart(batches: Batches) -> tuple[Batches, Batches | None]:
    """Hold back feeds that judge a loss, evenly spread; None if there are so few samples that all have to judge.

    Returns:
        The feeds to fit to, and those that judge.
    """
    if not _many(batches):
        return batches, None
    places = {*judging(batches)}
    sides = [[make for n, make in enumerate(batches.feeds) if (n in places) is side] for side in (False, True)]
    rest, held = (part_of(batches, side) for side in sides)
    return rest, replace(held, notes=())


def judging(batches: Batches) -> range:
    """Return the places of the feeds that `apart` holds back; else those of the half that judges fits to the other."""
    each = EACH if _many(batches) else HALVES
    return range(each // 2, len(batches), each)


def _many(batches: Batches) -> bool:
    """Return True if there are so many samples that a part of them judges."""
    return batches.samples >= MANY and len(batches) >= EACH


def shared(batches: Batches, held: Batches) -> int:
    """Return how many samples of two sets of feeds are the same."""
    known = {digest for feed in batches for digest in digests(feed)}
    return sum(digest in known for feed in held for digest in digests(feed))


def digests(feed: Feed) -> list[bytes]:
    """Return a checksum of some values of every sample; one of a feed whose arrays do not all begin with samples."""
    parts, found = rows_of(feed, LOOKED), list[bytes]()
    for row in range(len(parts[0]) if parts else 0):
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(content(part[row]))
        found.append(digest.digest())
    return found


def rows_of(feed: Feed, most: int) -> list[Array]:
    """Return about `most` values of every sample, (samples, values) per array; see `digests`."""
    arrays = [np.asarray(feed[name]) for name in sorted(feed)]
    counts = {len(array) for array in arrays if array.ndim}
    rows = counts.pop() if len(counts) == 1 and all(array.ndim for array in arrays) else 0
    parts = [array.reshape(max(rows, 1), -1) for array in arrays]
    return [part[:, :: max(1, part.shape[1] // most)] for part in parts]


def check_halves(batches: Batches) -> None:
    """Check that data can be divided, so that samples judge what is fitted to others.

    Raises:
        DataError: there is only one feed.
    """
    if len(batches) < 2:
        raise DataError(
            f"{batches.source} has a single batch ({batches.counted}): none is left to judge the loss",
            hint="Give more samples, or --held-out DATA",
        )


def gate(count: int) -> list[int]:
    """Return the numbers of the batches, of `count`, that choose a refinement's weights; empty for a single batch."""
    return list(range(GATE - 1, count, GATE)) or list(range(count))[1:][-1:]


def ungated(batches: Batches) -> Batches:
    """Return the batches without those of `gate`; all of them if these were more than a quarter.

    Weights that are fitted to the batches of the gate look better there than they are: a refinement of such weights
    would be taken back although it helps.
    """
    held = gate(len(batches))
    rest = [make for number, make in enumerate(batches.feeds) if number not in held]
    return part_of(batches, rest) if held and 4 * len(held) <= len(batches) else batches


def part_of(batches: Batches, feeds: Sequence[Callable[[], Feed]]) -> Batches:
    """Return batches with some of the feeds."""
    return replace(batches, feeds=tuple(feeds), samples=round(batches.samples * len(feeds) / len(batches)))


def few(batches: Batches) -> Batches:
    """Return a few feeds for a check, spread evenly over all of them."""
    each = -(-batches.samples // max(len(batches), 1))
    wanted = min(CHECKED_SAMPLES, max(CHECKED_LEAST, batches.samples // CHECKED_SHARE))
    count = min(len(batches), max(1, wanted // max(each, 1)))
    return replace(batches, feeds=spread(batches, count))


def chosen(batches: Batches, content: Floats, count: int) -> tuple[Callable[[], Feed], ...]:
    """Return `count` feeds in order, those with more in them more likely; evenly spread if all have the same.

    A step through the sum of the contents chooses, so that rare things which a model finds are not missed.

    Args:
        batches: the feeds.
        content: (feeds,) of each, not negative.
        count: at most all.
    """
    if content.min() == content.max():
        return spread(batches, count)
    ends = np.cumsum(content / max(content.mean(), 1e-12) + BARE)
    places = np.searchsorted(ends, ends[-1] * (2 * np.arange(count) + 1) / (2 * count), side="right")
    left = [n for n in np.argsort(-content, kind="stable").tolist() if n not in places]
    some = [*dict.fromkeys(places.tolist()), *left][:count]
    return tuple(batches.feeds[n] for n in sorted(some))


def spread(batches: Batches, count: int) -> tuple[Callable[[], Feed], ...]:
    """Return `count` feeds, spread evenly over all."""
    return tuple(batches.feeds[(2 * n + 1) * len(batches) // (2 * count)] for n in range(count))
