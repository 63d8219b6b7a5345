"""Models timed in turn, so that a busy machine slows all of them alike, and what such times say."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxgrail.calibration.runtime.session import Session
from onnxgrail.core import Feed, Floats

WARM = 3  # runs of each model that do not count
DRAWS = 2000  # resamples behind an interval
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Milliseconds per run of one model.

    Attributes:
        median, mean, p90, p99: of all runs; spread: distance of the quartiles.
        ratio: how many times as fast as the first model, by medians; None for the first.
        interval: where that ratio lies with 95 % confidence, from resampling rounds.
    """

    median: float
    mean: float
    p90: float
    p99: float
    spread: float
    ratio: float | None = None
    interval: tuple[float, float] | None = None

    @property
    def hidden(self) -> bool:
        """Whether noise hides which of the two is faster."""
        return self.interval is not None and self.interval[0] <= 1 <= self.interval[1]


def take_turns(
    sessions: Sequence[Session], feeds: Sequence[Feed], *, least: int, most: int, seconds: float, warm: int = WARM
) -> Floats:
    """Milliseconds (models, rounds); in every round each model runs once, another one first each time.

    Rounds go on until `seconds` are over, but there are at least `least` and at most `most`.

    Raises:
        ModelError: ONNX Runtime does not run a model on its feed.
    """
    turns = list(enumerate(zip(sessions, feeds, strict=True)))
    rounds: list[list[float]] = []
    for _ in range(warm):
        for session, feed in zip(sessions, feeds, strict=True):
            session.run(feed)
    started = time.perf_counter()
    while len(rounds) < least or (len(rounds) < most and time.perf_counter() - started < seconds):
        first = len(rounds) % len(turns)
        row = [0.0] * len(turns)
        for number, (session, feed) in turns[first:] + turns[:first]:
            row[number] = _timed(session, feed)
        rounds.append(row)
    return np.array(rounds).T


def _timed(session: Session, feed: Feed) -> float:
    started = time.perf_counter()
    session.run(feed)
    return (time.perf_counter() - started) * 1e3


def summarise(times: Floats, *, seed: int = 0) -> tuple[Times, ...]:
    """What times (models, rounds) say; the ratios are to the first model.

    The interval comes from drawing whole rounds again (bootstrap): what slowed a round slowed all models in it.
    """
    rounds = times.shape[1]
    drawn = np.random.default_rng(seed).integers(0, rounds, (DRAWS, rounds))
    found = []
    first = np.median(times[0][drawn], axis=1)
    for number, row in enumerate(times):
        low, middle, high, p90, p99 = np.percentile(row, (25, 50, 75, 90, 99)).tolist()
        ratio, interval = None, None
        if number:
            ratios = first / np.median(row[drawn], axis=1)
            ratio = float(np.median(times[0]) / middle)
            low_end, high_end = np.percentile(ratios, (50 * (1 - LEVEL), 50 * (1 + LEVEL))).tolist()
            interval = (low_end, high_end)
        found.append(
            Times(
                median=middle,
                mean=float(row.mean()),
                p90=p90,
                p99=p99,
                spread=high - low,
                ratio=ratio,
                interval=interval,
            )
        )
    return tuple(found)


def machine() -> str:
    """Processor and number of cores this process may use."""
    model = ""
    with contextlib.suppress(OSError):  # only Linux tells it here
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model or platform.processor() or platform.machine()}, {cores} cores"
