"""Batches of calibration data: feeds that can be iterated any number of times."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from onnxgrail.calibration.feeds.held_out import LEAST
from onnxgrail.core import Feed, Labels
from onnxgrail.errors import DataError, ModelError
from onnxgrail.fidelity.goals import IGNORED

ENOUGH = 32  # samples: with 8 of them a small ResNet at 0.4 keeps 72 % of its accuracy, with 32 99 %
JUDGED, NOISE = 32, 2.0  # labels, and standard deviations above chance, from which a model is known to be no guess


@runtime_checkable
class Labelled(Protocol):
    """A function that makes a feed and may know the true classes of its samples."""

    def labels(self) -> Labels | None:
        """Return the true classes; None if the data have none."""


def _labels(make: Callable[[], Feed], highest: int | None = None) -> Labels | None:
    """Return the true classes of a feed's samples, with the largest one of all samples."""
    labels: Labels | None = make.labels() if isinstance(make, Labelled) else None
    return labels if labels is None or highest is None else replace(labels, highest=highest)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batches:
    """Feeds for the model; every iteration gives the same values.

    Attributes:
        feeds: one function per feed, so that only one batch of mapped or random data is in memory at a time.
        samples: number of samples in all feeds together.
        source: name of the data in the report.
        notes: notes on data that were dropped, converted or assumed.
        synthetic: True for random data in place of the user's data.
        contents: by name of an output, what it holds, as far as the user says it.
        hint: advice for the error message when the model does not run on these feeds.
    """

    feeds: tuple[Callable[[], Feed], ...]
    samples: int
    source: str
    notes: tuple[str, ...] = ()
    synthetic: bool = False
    contents: Mapping[str, str] = field(default_factory=dict)
    hint: str = ""

    @contextlib.contextmanager
    def advising(self) -> Iterator[None]:
        """Add the hint to a `ModelError` that is raised inside the context.

        Raises:
            ModelError: the same error, with the hint if it had none.
        """
        try:
            yield
        except ModelError as error:
            if error.hint or not self.hint:
                raise
            raise ModelError(str(error), hint=self.hint) from error

    def __iter__(self) -> Iterator[Feed]:
        """Iterate over the feeds in a fixed order; each feed is created when it is requested."""
        return (make() for make in self.feeds)

    def labelled(self) -> Iterator[tuple[Feed, Labels | None]]:
        """Iterate over the feeds, each with the true classes of its samples, or None if the data have none."""
        highest = self.highest_class
        return ((make(), _labels(make, highest)) for make in self.feeds)

    @property
    def labels(self) -> tuple[Labels | None, ...]:
        """Return the true classes of the samples of each feed, None if the data have none; no feed is made."""
        return tuple(_labels(make) for make in self.feeds)

    @property
    def has_labels(self) -> bool:
        """Return True if the true classes of some samples are known."""
        return any(labels is not None for labels in self.labels)

    @property
    def highest_class(self) -> int:
        """Return the largest class of all samples, `IGNORED` left out; -1 without labels."""
        known = (labels.values.astype(np.int64) for labels in self.labels if labels is not None)
        return max((int(classes.max(initial=-1, where=classes != IGNORED)) for classes in known), default=-1)

    def unlike(self, outputs: Sequence[tuple[int, float | None]]) -> str:
        """Return a note on labels that no output has scores for, or that it meets by chance; empty if all is well.

        Args:
            outputs: the numbers of samples, or tokens, by whose labels outputs were judged, each with the share of
                samples for which the original is right.
        """
        highest = self.highest_class
        chance = 1 / max(highest + 1, 1)
        for judged, right in outputs:
            noise = NOISE * math.sqrt(chance * (1 - chance) / max(judged, 1))
            if right is not None and judged >= JUDGED and right < min(chance + noise, 1.0):
                return (
                    f"the original is right for {right:.1%} of the labels, as if by chance: are data and labels right?"
                )
        if highest < 0 or any(judged for judged, _ in outputs):
            return ""
        return (
            f"the labels were not used: they go up to {highest}, and no output is known to have a row of at least "
            f"{max(highest, 1) + 1} scores for each of them; --contents NAME=classes would tell"
        )

    def first(self) -> Feed:
        """Return the first feed.

        Raises:
            DataError: all its arrays are empty.
        """
        found = self.feeds[0]()
        if found and all(array.size == 0 for array in found.values()):
            raise DataError(f"{self.source}: there are no samples, every input is empty", hint="Give --data with some")
        return found

    def __len__(self) -> int:
        """Return the number of feeds."""
        return len(self.feeds)

    @property
    def counted(self) -> str:
        """Return how many samples there are, as text."""
        return "1 sample" if self.samples == 1 else f"{self.samples} samples"

    def scarce(self, held: int = 0, *, judged: bool = False) -> str:
        """Return a warning if there are too few samples for reliable statistics; '' otherwise, and for random data.

        Args:
            held: samples of the same data that are held back from the fit.
            judged: other data judge.
        """
        if self.synthetic or self.samples + min(held, LEAST) >= ENOUGH:
            return ""
        unseen = "" if held or judged else ", and the check on calibration samples does not show it"
        advice = "give 32 to 512" if held or judged else "give 32 to 512, and --held-out to see"
        return f"calibrated on {self.counted}: what is fitted to so few may be far off on others{unseen}; {advice}"
