"""Feeds for a model, as often as they are wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from onnxgrail.core import Feed, Labels
from onnxgrail.errors import DataError, ModelError

ENOUGH = 32  # samples: with 8 of them a small ResNet at 0.4 keeps 72 % of its accuracy, with 32 99 %


@runtime_checkable
class Labelled(Protocol):
    """A maker of a feed that may know what is right for its samples."""

    def labels(self) -> Labels | None:
        """The right classes, where the data have some."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batches:
    """Feeds for the model; may be iterated any number of times and gives the same values each time.

    Attributes:
        feeds: one function per feed, so that mapped or drawn data are in memory one batch at a time.
        samples: how many samples all feeds hold together.
        source: where they come from, for the report.
        notes: what was dropped, converted or assumed.
        synthetic: drawn, not the user's data.
        hint: what to try where the model does not run on them.
    """

    feeds: tuple[Callable[[], Feed], ...]
    samples: int
    source: str
    notes: tuple[str, ...] = ()
    synthetic: bool = False
    hint: str = ""

    @contextlib.contextmanager
    def advising(self) -> Iterator[None]:
        """Say what to try where the model does not run on these.

        Raises:
            ModelError: as it was raised inside, with a hint if it had none.
        """
        try:
            yield
        except ModelError as error:
            if error.hint or not self.hint:
                raise
            raise ModelError(str(error), hint=self.hint) from error

    def __iter__(self) -> Iterator[Feed]:
        """Feeds in a fixed order, each made anew."""
        return (make() for make in self.feeds)

    def labelled(self) -> Iterator[tuple[Feed, Labels | None]]:
        """The same feeds, each with the right classes of its samples where the data have some."""
        return ((make(), make.labels() if isinstance(make, Labelled) else None) for make in self.feeds)

    def first(self) -> Feed:
        """The first feed.

        Raises:
            DataError: it holds nothing.
        """
        found = self.feeds[0]()
        if found and all(array.size == 0 for array in found.values()):
            raise DataError(f"{self.source}: there are no samples, every input is empty", hint="Give --data with some")
        return found

    def __len__(self) -> int:
        """Number of feeds."""
        return len(self.feeds)

    def scarce(self, held: int = 0) -> str:
        """Return a warning where there are too few samples to rest statistics on; drawn ones have one of their own.

        Args:
            held: samples of the same data that are held back from the fit.
        """
        if self.synthetic or self.samples + held >= ENOUGH:
            return ""
        count = "1 sample" if self.samples == 1 else f"{self.samples} samples"
        unseen = "" if held else ", and the check on calibration samples does not show it"
        see = "" if held else ", and --held-out to see"
        return f"calibrated on {count}: what is fitted to so few may be far off on others{unseen}; give 32 to 512{see}"
