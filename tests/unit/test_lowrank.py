"""Low rank against the definitions: ranks, spectra, and what a singular value is worth."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.algebra.fit.lowrank import (
    attribution,
    best,
    pair,
    rank_of,
    saving,
    slope,
    spectrum,
    taylor,
    whitened,
)

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(("inputs", "outputs", "rank"), [(4096, 4096, 204), (4096, 11008, 298), (11008, 4096, 298)])
def test_a_tenth_of_the_parameters(inputs: int, outputs: int, rank: int) -> None:
    assert rank_of(inputs, outputs, 0.1) == rank
    kept = rank * (inputs + outputs)
    assert kept <= 0.1 * inputs * outputs < kept + inputs + outputs


def test_overall_ratios_of_the_papers_table() -> None:
    """Eight of 32 layers of LLaMA-2-7B at retain ratios of 0 to 20 %: 24.0, 22.8, 21.6, 20.4 and 19.2 % go."""
    layer = [(4096, 4096)] * 4 + [(4096, 11008)] * 2 + [(11008, 4096)]
    total = 6_738_415_616
    assert 8 * sum(m * n for m, n in layer) / total == pytest.approx(0.240, abs=5e-4)
    for retain, share in ((0.05, 0.228), (0.1, 0.216), (0.15, 0.204), (0.2, 0.192)):
        gone = 8 * sum(saving(m, n, rank_of(m, n, retain)) for m, n in layer)
        assert gone / total == pytest.approx(share, abs=6e-4)


def test_some_rank_always_stays() -> None:
    assert rank_of(3, 3, 0.01) == 1
    assert saving(2, 1, 1) < 0
    assert rank_of(2, 1, 0.1) == 1


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_all_directions_give_the_matrix_back(shape: tuple[int, int]) -> None:
    weight = RNG.normal(size=shape)
    gram = np.cov(RNG.normal(size=(shape[0], 40)))
    for found in (spectrum(weight), whitened(weight, gram)):
        made = pair(found, np.arange(6))
        np.testing.assert_allclose(made.down @ made.up, weight, atol=1e-10)
        np.testing.assert_allclose(np.linalg.norm(made.down, axis=0), np.linalg.norm(made.up, axis=1))
        assert made.lost == pytest.approx(0.0, abs=1e-12)


def test_what_whitened_directions_lose_is_the_error_of_the_outputs() -> None:
    weight = RNG.normal(size=(8, 7))
    x = RNG.normal(size=(200, 8)) * np.geomspace(1, 30, 8)
    made = pair(whitened(weight, x.T @ x / len(x)), np.arange(3))
    plain = pair(spectrum(weight), np.arange(3))

    def error(down: np.ndarray, up: np.ndarray) -> float:
        return float(np.square(x @ weight - x @ down @ up).sum() / np.square(x @ weight).sum())

    assert made.lost == pytest.approx(error(made.down, made.up), rel=1e-2)
    assert error(made.down, made.up) < 0.8 * error(plain.down, plain.up)


def test_inputs_that_depend_on_each_other_can_be_whitened() -> None:
    x = RNG.normal(size=(50, 3)) @ RNG.normal(size=(3, 8))
    weight = RNG.normal(size=(8, 7))
    made = pair(whitened(weight, x.T @ x), np.arange(3))
    np.testing.assert_allclose(x @ made.down @ made.up, x @ weight, atol=5e-2)


@pytest.mark.parametrize("way", [spectrum, lambda w: whitened(w, np.diag(np.arange(1.0, 6.0)))])
def test_slopes_are_those_of_the_values(way: object) -> None:
    weight, goal, x = RNG.normal(size=(5, 4)), RNG.normal(size=(20, 4)), RNG.normal(size=(20, 5))
    found = way(weight)  # type: ignore[operator]

    def loss(values: np.ndarray) -> float:
        return 0.5 * float(np.square(x @ (found.left * values) @ found.right - goal).sum())

    gradient = x.T @ (x @ weight - goal)
    for number in range(4):
        step = np.eye(4)[number] * 1e-5
        wanted = (loss(found.values + step) - loss(found.values - step)) / 2e-5
        assert slope(found, gradient)[number] == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(taylor(found, gradient), np.abs(found.values * slope(found, gradient)))


def test_attribution_adds_up_to_what_the_matrix_does() -> None:
    """A squared loss is a parabola on the way from nothing to the matrix, for which the midpoint is exact."""
    weight, goal, x = RNG.normal(size=(5, 4)), RNG.normal(size=(20, 4)), RNG.normal(size=(20, 5))
    none, whole = (0.5 * np.square(x @ w - goal).sum() for w in (0 * weight, weight))
    gradient = x.T @ (x @ (weight / 2) - goal)
    for found in (spectrum(weight), whitened(weight, x.T @ x)):
        assert attribution(found, gradient).sum() == pytest.approx(none - whole)


def test_the_best_are_in_order_and_ties_go_to_the_larger() -> None:
    assert best(np.array([1.0, 3.0, 2.0, 3.0, -1.0]), 3).tolist() == [1, 2, 3]
    assert best(np.zeros(5), 2).tolist() == [0, 1]
