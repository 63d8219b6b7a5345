"""The samples that judge a result: how users ask for them, and a few that fits have seen where there are no others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.data import Source
from onnxgrail.errors import UsageError
from onnxgrail.machine.numerals import whole

AUTO = "auto"  # --held-out where the user does not give it: a fifth of the data, see `apart`
CHECKED_SAMPLES = 16  # of samples that fits have seen, which say little
CHECKED_SHARE, CHECKED_LEAST = 16, 8  # one sample in so many, so that the check costs little beside the calibration


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """Feeds of samples that nothing is fitted to and the result is judged on.

    Attributes:
        asked: how the user asked for them: a number, the name of data, or `auto`.
        batches: the feeds.
        own: they are data of their own, not a part of the calibration data.
    """

    asked: str
    batches: Batches
    own: bool


def asked_for(held_out: Any) -> tuple[int | None, Source | None]:
    """Return how many samples to hold back, None where the data decide, and the data that judge instead.

    Raises:
        UsageError: it is not a number of samples, nor data.
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
    """Return how samples were asked for where none were held back."""
    return AUTO if asked_for(held_out)[0] is None else "0"


def few(batches: Batches) -> Batches:
    """Return feeds enough for a check, spread over all of them."""
    each = -(-batches.samples // max(len(batches), 1))
    wanted = min(CHECKED_SAMPLES, max(CHECKED_LEAST, batches.samples // CHECKED_SHARE))
    count = min(len(batches), max(1, wanted // max(each, 1)))
    numbers = [(2 * n + 1) * len(batches) // (2 * count) for n in range(count)]
    feeds = tuple(batches.feeds[n] for n in numbers)
    return replace(batches, feeds=feeds)
