"""Scores against their formulas, and the contract every selector keeps."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.algebra.selectors import SELECTORS
from onnxgrail.core import Role, View
from onnxgrail.errors import UsageError
from tests.unit.algebra_builders import mlp, view_of


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh for every test, so that none depends on another."""
    return np.random.default_rng(20260223)


def gated(rng: np.random.Generator) -> View:
    """Two producers of different size, a bias, two consumers behind different probes."""
    weights = [rng.standard_normal((5, 2, r)) for r in (3, 4, 1, 6, 2)]
    roles: tuple[Role, ...] = ("producer", "producer", "passenger", "consumer", "consumer")
    rows = [rng.standard_normal((20, 10)), rng.standard_normal((30, 5)) * 3.0]
    return view_of(list(zip(roles, weights, strict=True)), rows, feeds=[0, 1], pooled=[False, True])


def test_l1_sums_all_producers(rng: np.random.Generator) -> None:
    view = gated(rng)
    want = [sum(np.abs(view.weights[s][u]).sum() for s in (0, 1)) for u in range(5)]
    np.testing.assert_allclose(SELECTORS["l1"](view, rng), want)


def test_l2_adds_squares_of_all_producers(rng: np.random.Generator) -> None:
    view = gated(rng)
    want = [np.linalg.norm(np.concatenate([view.weights[s][u].ravel() for s in (0, 1)])) for u in range(5)]
    np.testing.assert_allclose(SELECTORS["l2"](view, rng), want)


def test_wanda_from_the_definition(rng: np.random.Generator) -> None:
    weights = [rng.standard_normal((3, 2, 4)), rng.standard_normal((3, 2, 2))]
    joint, pooled = rng.standard_normal((20, 6)), rng.standard_normal((30, 3)) * 3.0
    view = view_of([("consumer", w) for w in weights], [joint, pooled], feeds=[0, 1], pooled=[False, True])
    want = np.zeros(3)
    for u in range(3):
        for m in range(2):
            want[u] += np.abs(weights[0][u, m]).sum() * np.sqrt(np.mean(joint[:, 2 * u + m] ** 2))
            want[u] += np.abs(weights[1][u, m]).sum() * np.sqrt(np.mean(pooled[:, u] ** 2))
    np.testing.assert_allclose(SELECTORS["wanda"](view, rng), want)


def test_wanda_ranks_silent_channels_last(rng: np.random.Generator) -> None:
    view = view_of([("consumer", np.ones((3, 1, 2)))], [np.array([[1.0, 0.0, 2.0]] * 4)])
    assert np.argmin(SELECTORS["wanda"](view, rng)) == 1


def test_wanda_without_data_says_so(rng: np.random.Generator) -> None:
    view = view_of([("consumer", np.ones((3, 1, 2)))])
    with pytest.raises(UsageError, match=r"'block' has no activation statistics.*l2"):
        SELECTORS["wanda"](view, rng)


@pytest.mark.parametrize("name", SELECTORS)
def test_shape_and_finite(name: str, rng: np.random.Generator) -> None:
    scores = SELECTORS[name](gated(rng), rng)
    assert scores.shape == (5,)
    assert scores.dtype == np.float64
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("name", SELECTORS)
def test_same_seed_same_scores(name: str) -> None:
    view = gated(np.random.default_rng(3))
    first, second = (SELECTORS[name](view, np.random.default_rng(7)) for _ in range(2))
    assert np.array_equal(first, second)


def test_random_follows_the_generator() -> None:
    view = mlp(np.random.default_rng(0))
    scores = [SELECTORS["random"](view, np.random.default_rng(seed)) for seed in (1, 2)]
    assert not np.array_equal(scores[0], scores[1])


def test_only_wanda_asks_for_data(rng: np.random.Generator) -> None:
    needy = {name for name, selector in SELECTORS.items() if selector.needs_data}
    assert needy == {"wanda"}
    without = view_of([("producer", np.ones((3, 1, 2))), ("consumer", np.ones((3, 1, 2)))])
    for name in set(SELECTORS) - needy:
        assert SELECTORS[name](without, rng).shape == (3,)
