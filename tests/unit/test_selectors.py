"""Scores against their formulas, and the contract every selector keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from onnxgrail.algebra.moments.curves import fluctuation
from onnxgrail.algebra.select.selectors import SELECTORS, needs_gram
from onnxgrail.algebra.select.selectors.flap import Flap, Metric
from onnxgrail.algebra.select.selectors.gram import leverage
from onnxgrail.core import Floats, Role, View
from onnxgrail.errors import UsageError
from tests.unit.algebra_builders import mlp, view_of


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh for every test, so that none depends on another."""
    return np.random.default_rng(20260223)


def gated(rng: np.random.Generator) -> View:
    """Two producers of different size, a bias, two consumers after different probes."""
    weights = [rng.standard_normal((5, 2, r)) for r in (3, 4, 1, 6, 2)]
    roles: tuple[Role, ...] = ("producer", "producer", "passenger", "consumer", "consumer")
    rows = [rng.standard_normal((20, 10)), rng.standard_normal((30, 5)) * 3.0]
    found = view_of(list(zip(roles, weights, strict=True)), rows, feeds=[0, 1], pooled=[False, True])
    return replace(found, gradient=rng.random(5))


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


def test_wandapp_adds_the_gradient_to_wanda(rng: np.random.Generator) -> None:
    view = gated(rng)
    assert view.gradient is not None
    want = SELECTORS["wanda"](view, rng) + 100 * view.gradient
    np.testing.assert_allclose(SELECTORS["wandapp"](view, rng), want)
    with pytest.raises(UsageError, match="'block' has no regional gradient"):
        SELECTORS["wandapp"](replace(view, gradient=None), rng)


@pytest.mark.parametrize("name", [name for name, selector in SELECTORS.items() if selector.needs_data])
def test_without_data_they_say_so(name: str, rng: np.random.Generator) -> None:
    view = view_of([("consumer", np.ones((3, 1, 2)))])
    with pytest.raises(UsageError, match=r"'block' has no activation statistics.*l2"):
        SELECTORS[name](view, rng)


@pytest.mark.parametrize("name", [n for n, s in SELECTORS.items() if s.needs_data and not needs_gram(s)])
def test_those_that_deny_it_read_no_products(name: str, rng: np.random.Generator) -> None:
    view = gated(rng)
    alone = tuple(replace(stats, gram=np.array(stats.squares)) for stats in view.stats)
    want, got = (SELECTORS[name](v, rng) for v in (view, replace(view, stats=alone)))
    np.testing.assert_array_equal(got, want)


def test_who_does_not_deny_it_may_read_products() -> None:
    assert {name for name, one in SELECTORS.items() if needs_gram(one)} == {"auto", "gram", "obs", "slimgpt"}

    class Own:
        needs_data = True

    assert needs_gram(Own())  # type: ignore[arg-type]


def activations(rng: np.random.Generator) -> tuple[View, list[Floats], list[Floats]]:
    """Two consumers of heads of 2 features and one of a pooled probe, with the rows and weights that they stand for."""
    rows = [rng.standard_normal((20, 6)) + 1.0, rng.standard_normal((30, 3)) * 3.0 - 0.5]
    weights = [rng.standard_normal((3, 2, r)) for r in (4, 2, 5)]
    view = view_of([("consumer", w) for w in weights], rows, feeds=[0, 0, 1], pooled=[False, True], kind="heads")
    return view, rows, weights


def flap_by_loops(metric: str, rows: list[Floats], weights: list[Floats]) -> Floats:
    """Each feature (3, 2) on its own, summed over consumers."""
    want = np.zeros((3, 2))
    for u in range(3):
        for m in range(2):
            for number, weight in enumerate(weights):
                x = rows[0][:, 2 * u + m] if number < 2 else rows[1][:, u]
                w = weight[u, m] if number < 2 else weight[u].ravel()
                if metric == "wifv":
                    want[u, m] += np.mean((x - x.mean()) ** 2) * np.sum(w**2)
                elif metric == "wifn":
                    want[u, m] += np.sqrt(np.mean(x**2)) * np.mean(np.abs(w))
                elif number != 1:  # two consumers of one activation see one variance
                    want[u, m] += np.mean((x - x.mean()) ** 2)
    return want


@pytest.mark.parametrize("metric", get_args(Metric))
def test_flap_from_the_definition(metric: Metric, rng: np.random.Generator) -> None:
    view, rows, weights = activations(rng)
    want = flap_by_loops(metric, rows, weights)
    np.testing.assert_allclose(Flap(metric=metric)(view, rng), want.mean(axis=1))


def test_flap_does_not_mind_what_is_always_there(rng: np.random.Generator) -> None:
    rows = np.column_stack([np.full(9, 100.0), rng.standard_normal(9), rng.standard_normal(9)])
    view = view_of([("consumer", np.ones((3, 1, 2)))], [rows])
    assert np.argmin(SELECTORS["flap"](view, rng)) == 0
    assert np.argmax(SELECTORS["wanda"](view, rng)) == 0


def test_standardised_scores_can_be_compared_between_blocks(rng: np.random.Generator) -> None:
    view, *_ = activations(rng)
    large = replace(view, weights=tuple(1e3 * w for w in view.weights))
    np.testing.assert_allclose(fluctuation(large), fluctuation(view), rtol=1e-9)
    flat = view_of([("consumer", np.ones((3, 1, 2)))], [np.zeros((5, 3))])
    assert fluctuation(flat).tolist() == [0.0, 0.0, 0.0]


def test_leverage_from_the_definition(rng: np.random.Generator) -> None:
    view, rows, _ = activations(rng)
    want = np.zeros(3)
    for x, members in zip(rows, (2, 1), strict=True):
        G = x.T @ x
        hat = G @ np.linalg.inv(G + np.trace(G) / len(G) * np.eye(len(G)))
        for u in range(3):
            want[u] += np.trace(hat[u * members : (u + 1) * members, u * members : (u + 1) * members])
    np.testing.assert_allclose(SELECTORS["gram"](view, rng), want)
    single = leverage(rows[0].T @ rows[0], 1e-9)
    np.testing.assert_allclose(single, 1.0, atol=1e-6)  # nothing is redundant, and the ridge hides nothing


def test_leverage_of_a_copy_is_shared(rng: np.random.Generator) -> None:
    x = np.linalg.qr(rng.standard_normal((30, 3))).Q
    got = leverage((G := x[:, [0, 1, 2, 2]]).T @ G, 1e-6)
    np.testing.assert_allclose(got, [1.0, 1.0, 0.5, 0.5], atol=1e-5)


def test_key_value_groups_add_up_all_their_features(rng: np.random.Generator) -> None:
    view = mlp(rng, units=3, members=8)  # 2 query heads of 4 features each per key-value head
    heads = view_of([("consumer", view.weights[2].reshape(6, 4, 5))], [np.zeros((1, 24))])
    heads = replace(heads, stats=view.stats)
    for name, together in (("wanda", np.sum), ("gram", np.sum), ("flap", np.mean)):
        single = SELECTORS[name](heads, rng).reshape(3, 2)
        np.testing.assert_allclose(SELECTORS[name](view, rng), together(single, axis=1))


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


def test_who_asks_for_data(rng: np.random.Generator) -> None:
    needy = {name for name, selector in SELECTORS.items() if selector.needs_data}
    assert needy == {"auto", "wanda", "wandapp", "flap", "gram", "obs", "slimgpt"}
    without = view_of([("producer", np.ones((3, 1, 2))), ("consumer", np.ones((3, 1, 2)))])
    for name in set(SELECTORS) - needy:
        assert SELECTORS[name](without, rng).shape == (3,)


@pytest.mark.parametrize("name", ["obs", "gram", "slimgpt"])
def test_products_in_float32_are_used_in_float64(name: str, rng: np.random.Generator) -> None:
    view = mlp(rng)
    single = tuple(replace(one, gram=one.gram.astype(np.float32)) for one in view.stats)
    double = tuple(replace(one, gram=one.gram.astype(np.float64)) for one in single)
    want, got = (SELECTORS[name](replace(view, stats=stats), rng) for stats in (double, single))
    np.testing.assert_array_equal(got, want)
