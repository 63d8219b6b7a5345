"""How work tells how far it has come."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol


class Progress(Protocol):
    """Called as work goes on: `stage` names it, `done` of `total` steps are finished."""

    def __call__(self, stage: str, done: int, total: int, /) -> None:
        """Take note."""


def silent(stage: str, done: int, total: int) -> None:
    """The progress of somebody who does not want to know."""


Tick = Callable[[], None]
"""Called whenever one of many like things is done."""


def ticking(progress: Progress, stage: str, total: int) -> Tick:
    """A tick that tells how many of so many things are done; more ticks than that say nothing new.

    It may come from any thread.
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
    """Seconds per stage; `progress` is told when a stage begins and when it is done, as one step."""

    progress: Progress = silent
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of a with-block towards a stage."""
        started = time.perf_counter()
        self.progress(name, 0, 1)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        self.progress(name, 1, 1)
