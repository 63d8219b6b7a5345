"""Progress on stderr: bars on a terminal, one line per finished stage elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import click

Show = Callable[[str, int, int], None]
EXPECTED = "expected: "  # begins a stage that only tells what the run will take, see `Clock.expect`
QUIET_SECONDS = 30.0  # a longer stage reports its progress, so that a log shows that work goes on

HOLD = 2.0  # seconds for which lines are held back
SHORT = 0.05  # seconds below which a stage gets no line
SPEED = 3600.0  # seconds over which a bar averages: single steps may take minutes


@contextlib.contextmanager
def progress(*, quiet: bool, no_progress: bool) -> Iterator[Show]:
    """Yield a progress callback for the library: bars with ETA on a terminal, lines with times elsewhere."""
    if quiet or no_progress:
        yield _nothing
    elif sys.stderr is None or not sys.stderr.isatty():
        with _lines() as show:
            yield show
    else:
        with _bars() as show:
            yield show


def _nothing(stage: str, done: int, total: int) -> None:
    del stage, done, total


@contextlib.contextmanager
def _lines() -> Iterator[Show]:
    """Yield a callback that prints lines, held back for a moment, so that an early error is the only line."""
    waiting: list[str] = []
    start = time.perf_counter()

    def say(line: str) -> None:
        waiting.append(line)
        if time.perf_counter() - start > HOLD:
            flush()

    def flush() -> None:
        while waiting:
            click.echo(waiting.pop(0), err=True)

    lines = StageLines(say)
    over = threading.Event()

    def remind() -> None:
        while not over.wait(HOLD):
            lines.remind()

    reminder = threading.Thread(target=remind, daemon=True)
    reminder.start()
    try:
        yield lines
    finally:
        over.set()
        reminder.join()
    flush()  # not after an error


class StageLines:
    """A callback that prints a line when a stage is done, with the time since the start and that of the stage.

    Stages within a stage and very short stages have no line.  A long stage reports its progress, also where a single
    step of it is long.
    """

    def __init__(self, say: Callable[[str], None], now: Callable[[], float] = time.perf_counter) -> None:
        self._say, self._now = say, now
        self._start = self._last = now()
        self._running: dict[str, tuple[float, int, int]] = {}  # when it began, and the steps that are done, and all
        self._lock = threading.Lock()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Receive a progress report."""
        moment = self._now()
        with self._lock:
            if stage.startswith(EXPECTED):
                self._line(moment, stage)
                return
            began = self._running.get(stage, (moment, 0, 0))[0]
            self._running[stage] = began, done, total
            if done < total:
                self._report(stage, moment)
            elif next(iter(self._running)) != stage:
                del self._running[stage]
            else:
                self._running.clear()
                self._last = moment
                if moment - began >= SHORT:
                    self._line(moment, f"{stage}: {moment - began:.1f} s")

    def remind(self) -> None:
        """Report the progress of the innermost stage if nothing was said for long."""
        moment = self._now()
        with self._lock:
            if self._running:
                self._report(next(reversed(self._running)), moment)

    def _report(self, stage: str, moment: float) -> None:
        if moment - self._last <= QUIET_SECONDS:
            return
        began, done, total = self._running[stage]
        left = f", about {(moment - began) * (total - done) / done:.0f} s left" if done else ""
        steps = f"{stage}: {100 * done / total:.0f} %{left}" if total > 1 else stage
        self._line(moment, f"{steps} ...")
        self._last = moment

    def _line(self, moment: float, text: str) -> None:
        self._say(f"[{moment - self._start:7.1f} s] {text}")


@contextlib.contextmanager
def _bars() -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, speed_estimate_period=SPEED) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage.startswith(EXPECTED):
                bar.console.print(stage)
                return
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done, total=total)
            if total == 1 and done == 1:  # a stage of a single step leaves no full bar
                bar.remove_task(tasks.pop(stage))

        yield show
