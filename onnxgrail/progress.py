"""How work tells how far it has come."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
