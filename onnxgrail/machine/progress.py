"""Progress reports and timing of long work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol


class Progress(Protocol):
    """A callback for progress: `stage` is the name of the work, `done` of `total` steps are finished."""

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        """Receive a progress report."""


def silent(stage: str, done: int, total: int) -> None:
    """Ignore a progress report."""


EXPECTED = "expected: "  # begins the name of a step that only tells what the run will take
Tick = Callable[[], None]
"""Called whenever one of many similar steps is done."""


def ticking(progress: Progress, stage: str, total: int) -> Tick:
    """Return a function that counts finished steps and reports them; it stops counting at `total`.

    The function may be called from any thread.
    """
    done = 0
    lock = threading.Lock()

    def tick() -> None:
        nonlocal done
        with lock:
            done = min(done + 1, total)
            progress(stage, done, total)

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
