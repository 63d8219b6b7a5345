"""The samples that judge a result: the user's request for them, or else a few calibration samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.data import Source
from onnxgrail.errors import UsageError
from onnxgrail.machine.numerals import whole

AUTO = "auto"  # default of --held-out: a fifth of the data, see `held_out`
CHECKED_SAMPLES = 16  # limit of calibration samples, which say little because fits have seen them
CHECKED_SHARE, CHECKED_LEAST = 16, 8  # one sample in so many, so that the check costs little beside the calibration


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """Feeds of samples that judge the result; nothing is fitted to them.

    Attributes:
        asked: the user's request: a number, the name of data, or `auto`.
        batches: the feeds.
        own: True if they come from other data than the calibration data.
    """

    asked: str
    batches: Batches
    own: bool


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
    count = held_out if text is None else whole(text)
    if not isinstance(count, int):
        return 0, held_out
    if isinstance(count, bool) or count < 0:
        raise UsageError(f"--held-out must be a number of samples, 0 or more, or data, got {held_out!r}")
    return count, None


def words_of(held_out: Any) -> str:
    """Return the text of the user's request, for reports in which no samples were held back."""
    return AUTO if asked_for(held_out)[0] is None else "0"


def few(batches: Batches) -> Batches:
    """Return a few feeds for a check, spread evenly over all of them."""
    each = -(-batches.samples // max(len(batches), 1))
    wanted = min(CHECKED_SAMPLES, max(CHECKED_LEAST, batches.samples // CHECKED_SHARE))
    count = min(len(batches), max(1, wanted // max(each, 1)))
    numbers = [(2 * n + 1) * len(batches) // (2 * count) for n in range(count)]
    feeds = tuple(batches.feeds[n] for n in numbers)
    return replace(batches, feeds=feeds)
