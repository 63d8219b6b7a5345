"""Progress of calibration counts each batch, decision and fit once, by the time it is expected to take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxgrail
from onnxgrail.machine.progress import FINE, ticking, weighted
from onnxgrail.narrowing.forecast.ticks import STAGE
from tests.tiny import two_mlps

Seen = list[tuple[int, int]]
WAYS: dict[str, dict[str, Any]] = {
    "grail": {"compensate": "grail"},
    "closed loop": {"compensate": "grail", "closed_loop": True},
    "best": {"compensate": "best"},
    "fold": {"compensate": "best", "reducer": "fold"},
    "obs": {"compensate": "grail", "selector": "obs"},
}


def seen_by(**choices: Any) -> Seen:
    """Return the reports about calibration of a run on two blocks and eight batches."""
    data, seen = np.random.default_rng(0).standard_normal((128, 8)).astype(np.float32), Seen()

    def progress(stage: str, done: int, total: int) -> None:
        if stage == STAGE:
            seen.append((done, total))

    given = {"unit_ratio": 0.5, "round_to": 1, "batch_size": 16, **choices}
    onnxgrail.compress(two_mlps(8, 16, 16), data=data, progress=progress, **given)
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_the_last_report_and_no_other_says_that_all_is_done(way: str) -> None:
    seen = seen_by(**WAYS[way])
    done = [one for one, _ in seen]
    assert {total for _, total in seen} == {FINE}
    assert done == sorted(done)
    assert done[0] == 0
    assert done[-2] < done[-1] == FINE


def test_a_resumed_run_reports_the_steps_that_it_leaves_out(tmp_path: Path) -> None:
    first, second = (seen_by(compensate="best", resume=tmp_path / "steps") for _ in range(2))
    assert len(first) == len(second)
    assert second[-2][0] < second[-1][0] == FINE


def test_steps_count_by_their_cost() -> None:
    seen = Seen()
    tick = weighted(lambda _, done, total: seen.append((done, total)), "walk", [1.0, 1.0, 6.0])
    for _ in range(4):  # one more than there are: it stays at the end
        tick()
    assert seen == [(0, FINE), (125, FINE), (250, FINE), (FINE, FINE), (FINE, FINE)]


@pytest.mark.parametrize("costs", [[], [0.0, 0.0]])
def test_work_of_no_cost_reports_nothing(costs: list[float]) -> None:
    seen = Seen()
    weighted(lambda _, done, total: seen.append((done, total)), "walk", costs)()
    assert not seen


def test_similar_steps_are_counted_one_by_one() -> None:
    seen = Seen()
    tick = ticking(lambda _, done, total: seen.append((done, total)), "walk", 2)
    for _ in range(2):
        tick()
    assert seen == [(0, 2), (1, 2), (2, 2)]
