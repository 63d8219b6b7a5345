"""Statistics of times: percentiles, and whether noise hides a difference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxgrail.calibration.runtime import timing
from onnxgrail.calibration.runtime.timing import summarise, take_turns


class Clockless:
    """A session that notes when it is asked."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def run(self, feed: Any) -> dict[str, Any]:
        self.seen.append(self.name)
        return {}


@pytest.mark.parametrize(("short", "twice"), [(0.0, 1), (np.inf, 2)])
def test_models_take_turns_and_each_is_first_in_its_turn(
    short: float, twice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run is not timed after those of others, whose data are in the caches of the processor."""
    monkeypatch.setattr(timing, "SHORT", short)
    seen: list[str] = []
    sessions: Any = [Clockless(name, seen) for name in "abc"]
    times = take_turns(sessions, [{}] * 3, least=4, most=4, seconds=0, warm=1)
    assert times.shape == (3, 4)
    assert "".join(seen) == "abc" + "".join(name * twice for name in "abc" + "bca" + "cab" + "abc")
    assert (times > 0).all()


def test_rounds_end_with_the_time_but_not_too_early() -> None:
    sessions: Any = [Clockless("a", [])]
    assert take_turns(sessions, [{}], least=5, most=100, seconds=0).shape == (1, 5)
    assert take_turns(sessions, [{}], least=5, most=7, seconds=60).shape == (1, 7)


def test_numbers_of_known_times() -> None:
    rows = np.array([np.arange(1.0, 101.0), np.arange(1.0, 101.0) / 2])
    first, second = summarise(rows)
    assert (first.median, first.mean, first.spread) == (50.5, 50.5, 49.5)
    assert (first.p90, first.p99) == (pytest.approx(90.1), pytest.approx(99.01))
    assert (first.ratio, first.interval, first.hidden) == (None, None, False)
    assert second.ratio == 2.0
    assert second.interval is not None
    assert second.interval[0] == pytest.approx(2) == second.interval[1]  # whole rounds are drawn: both were slow alike


@pytest.mark.parametrize(("gain", "hidden"), [(1.0, True), (1.004, True), (1.2, False), (0.8, False)])
def test_noise_hides_small_differences(gain: float, hidden: bool) -> None:
    rng = np.random.default_rng(3)
    rows = rng.lognormal(0, 0.1, (2, 200)) / np.array([[1.0], [gain]])
    _, second = summarise(rows)
    assert second.hidden is hidden
    low, high = second.interval or (0, 0)
    assert low < (second.ratio or 0) < high
    assert low < gain < high


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    found = [summarise(rng.lognormal(0, 0.2, (2, 40)), seed=k)[1].hidden for k in range(60)]
    assert 0.85 <= np.mean(found) <= 1
