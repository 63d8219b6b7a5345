"""The upper bound of a mean holds on few, skewed samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from onnxgrail.core import Floats
from onnxgrail.fidelity.loss import upper_bound

TRIALS = 300
NOISE = 3 * math.sqrt(0.95 * 0.05 / TRIALS)
Draw = Callable[[np.random.Generator, int], Floats]
CASES: dict[str, tuple[Draw, float]] = {
    "exponential": (lambda rng, n: rng.exponential(size=n), 1.0),
    "lognormal": (lambda rng, n: rng.lognormal(0, 1, n), math.exp(0.5)),
    "uniform": (lambda rng, n: rng.random(n), 0.5),
    "4 of 10 differ": (lambda rng, n: np.where(rng.random(n) < 0.4, 1.0, 0.01) * rng.random(n), 0.203),
    "4 of 10 are wrong": (lambda rng, n: (rng.random(n) < 0.4) + 0.001 * rng.random(n), 0.4005),
}


def bounds(draw: Draw, count: int, trials: int = TRIALS) -> Floats:
    rng = np.random.default_rng(count)
    return np.array([upper_bound(draw(rng, count)) for _ in range(trials)])


@pytest.mark.parametrize("count", [8, 16, 32, 64])
@pytest.mark.parametrize("case", CASES)
def test_it_holds_in_95_of_100_samples(case: str, count: int) -> None:
    draw, mean = CASES[case]
    assert np.mean(bounds(draw, count) >= mean) >= 0.95 - NOISE


def test_few_near_misses_among_many_zeros() -> None:
    """One sample in eight is bad: 64 samples show it."""

    def draw(rng: np.random.Generator, n: int) -> Floats:
        return np.where(rng.random(n) < 1 / 8, rng.exponential(size=n), 0.0)

    assert np.mean(bounds(draw, 64) >= 1 / 8) >= 0.95 - NOISE


@pytest.mark.parametrize(("count", "most"), [(64, 1.5), (512, 1.15)])
def test_it_is_not_loose(count: int, most: float) -> None:
    assert np.median(bounds(CASES["exponential"][0], count, 60)) < most


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        ([], math.inf),
        ([0.1], math.inf),
        ([0.1, math.nan], math.inf),
        ([0.1, math.inf], math.inf),
        ([0.0] * 9, 0.0),
        ([0.25] * 9, 0.25),
    ],
)
def test_edges(values: list[float], bound: float) -> None:
    assert upper_bound(np.array(values)) == pytest.approx(bound)


def test_it_is_never_below_the_mean_and_always_the_same() -> None:
    rng = np.random.default_rng(0)
    for count in (2, 3, 5, 40):
        values = -rng.exponential(size=count)  # skewed to the other side
        assert upper_bound(values) >= values.mean()
        assert upper_bound(values) == upper_bound(values)
        assert upper_bound(100 * values) == pytest.approx(100 * upper_bound(values))
