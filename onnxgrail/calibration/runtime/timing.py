"""Alternating timing of models, so that a busy machine slows all of them alike, and its statistics."""

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

WARM = 3  # warm-up runs of each model
SHORT = 1.0  # milliseconds of a run below which the state of caches decides
DRAWS = 2000  # bootstrap resamples per interval
FEWEST = 6  # rounds; the range of fewer runs holds the median less often than an interval promises
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Milliseconds per run of a model.

    Attributes:
        median, mean, p90, p99: of all runs.
        spread: distance of the quartiles.
        ratio: speed relative to the first model, by medians; None for the first.
        interval: 95 % confidence interval of the ratio, from resampled rounds; None for fewer than `FEWEST`.
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
        """Return True if noise hides which of the two models is faster."""
        return self.interval is not None and self.interval[0] <= 1 <= self.interval[1]


def take_turns(
    sessions: Sequence[Session], feeds: Sequence[Feed], *, least: int, most: int, seconds: float, warm: int = WARM
) -> Floats:
    """Return milliseconds (models, rounds); each model is timed once per round, and the order rotates.

    The others have filled the caches of the processor meanwhile, which a short run would mostly wait for: before it is
    timed, such a model runs once more, as it does on a server with no other.

    Args:
        sessions: a session per model.
        feeds: a feed per model.
        least: minimum number of rounds.
        most: maximum number of rounds.
        seconds: time after which rounds stop, within these bounds.
        warm: warm-up runs of each model.

    Raises:
        ModelError: ONNX Runtime does not run a model on its feed.
    """
    turns = list(enumerate(zip(sessions, feeds, strict=True)))
    rounds: list[list[float]] = []
    warmed = [[_timed(session, feed) for session, feed in zip(sessions, feeds, strict=True)] for _ in range(warm)]
    short = [milliseconds < SHORT for milliseconds in np.min(warmed, axis=0, initial=np.inf).tolist()]
    started = time.perf_counter()
    while len(rounds) < least or (len(rounds) < most and time.perf_counter() - started < seconds):
        first = len(rounds) % len(turns)
        row = [0.0] * len(turns)
        for number, (session, feed) in turns[first:] + turns[:first]:
            if short[number]:
                session.run(feed)
            row[number] = _timed(session, feed)
        rounds.append(row)
    return np.array(rounds).T


def _timed(session: Session, feed: Feed) -> float:
    started = time.perf_counter()
    session.run(feed)
    return (time.perf_counter() - started) * 1e3


def summarise(times: Floats, *, seed: int = 0) -> tuple[Times, ...]:
    """Summarize times (models, rounds); the ratios are relative to the first model.

    The interval comes from resampling whole rounds (bootstrap), because a disturbance slows all models of a round.
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
            interval = (low_end, high_end) if rounds >= FEWEST else None
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
    """Return the processor and the number of cores this process may use."""
    model = ""
    with contextlib.suppress(OSError):  # Linux only
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model or platform.processor() or platform.machine()}, {cores} cores"
