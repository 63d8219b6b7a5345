"""Progress reports and timing of long work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol


class Progress(Protocol):
    """A callback for progress: `stage` is the name of the work, `done` of `total` steps are finished."""

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        """Receive a progress report."""


def silent(stage: str, done: int, total: int) -> None:
    """Ignore a progress report."""


EXPECTED = "expected: "  # begins the name of a step that only tells what the run will take
FINE = 1000  # steps that are reported where steps take different times
Tick = Callable[[], None]
"""Called whenever one of many steps is done."""


def ticking(progress: Progress, stage: str, total: int) -> Tick:
    """Return a function that counts finished steps of similar length and reports them; it stops counting at `total`.

    The function may be called from any thread.
    """
    return _counting(progress, stage, range(1, total + 1))


def weighted(progress: Progress, stage: str, costs: Sequence[float]) -> Tick:
    """Return a function like that of `ticking` for steps of different length.

    It reports how many of `FINE` equal parts of the costs are done, so that time left follows from `done` and `total`.

    Args:
        progress: receives the reports.
        stage: the name of the work.
        costs: the expected cost of each step, in any unit, in the order in which steps are done.
    """
    sums = list(accumulate(costs))
    return _counting(progress, stage, [round(FINE * done / sums[-1]) for done in sums] if sums and sums[-1] > 0 else [])


def _counting(progress: Progress, stage: str, marks: Sequence[int]) -> Tick:
    """Report that work begins; return a function that reports the next of the marks, of which the last is the total."""
    count = 0
    lock = threading.Lock()
    if marks:
        progress(stage, 0, marks[-1])

    def tick() -> None:
        nonlocal count
        with lock:
            count = min(count + 1, len(marks))
            if marks:
                progress(stage, marks[count - 1], marks[-1])

    return tick


@dataclass(slots=True)
class Clock:
    """The seconds spent per stage; `progress` receives the start and the end of a stage as one step.

    Attributes:
        expected: what the run was expected to take before it started, if that was asked for.
    """

    progress: Progress = silent
    seconds: dict[str, float] = field(default_factory=dict)
    expected: Mapping[str, float] = field(default_factory=dict)

    def expect(self, told: str, amounts: Mapping[str, float]) -> None:
        """Keep what the run is expected to take, and report it in words."""
        self.expected = amounts
        self.progress(EXPECTED + told, 1, 1)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of a with-block to a stage."""
        started = time.perf_counter()
        self.progress(name, 0, 1)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        self.progress(name, 1, 1)
