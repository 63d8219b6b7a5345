"""Confidence intervals of shares and of values of sums."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.fidelity import intervals
from onnxgrail.fidelity.intervals import of_count, of_samples, upper_bound


def test_an_interval_of_counts() -> None:
    """Values of Wilson's interval that are printed in textbooks."""
    assert of_count(0, 0) is None
    assert of_count(48, 48) == pytest.approx((0.926, 1.0), abs=1e-3)
    assert of_count(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


@pytest.mark.parametrize("right", [0, 1])
def test_a_share_lies_in_its_interval(right: int) -> None:
    for count in range(1, 500):
        low, high = of_count(right * count, count) or (2, -1)
        assert low <= right <= high


def test_an_interval_by_resampling_holds_the_mean() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        table = np.stack([rng.exponential(size=60), np.ones(60)], axis=1)
        low, high = of_samples(table, lambda sums: sums[..., 0] / sums[..., 1]) or (0.0, 0.0)
        hits += low < 1 < high
    assert hits >= 88
    assert of_samples(np.ones((1, 2)), lambda sums: sums[..., 0]) is None
    first, second = (of_samples(table, lambda sums: sums[..., 0]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("cells", [2**22, 2000])
def test_resamples_are_kept_and_change_no_number(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn once for all values on as many samples; many samples are drawn again each time, some at a time."""
    values = np.random.default_rng(1).exponential(size=(30, 1))

    def found() -> list[object]:
        return [upper_bound(values[:, 0]), of_samples(values, lambda sums: sums[..., 0])]

    monkeypatch.setattr(intervals, "CELLS", cells)
    monkeypatch.setattr(intervals, "KEPT", 0)
    wanted = found()
    monkeypatch.setattr(intervals, "KEPT", 2**19)
    intervals._few_resamples.cache_clear()
    assert [found() for _ in range(2)] == [wanted] * 2
    assert intervals._few_resamples.cache_info().misses == 1
