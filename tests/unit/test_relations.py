"""Relations between formulas: published identities that hold whatever the numbers are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgrail.algebra.fit.choice import Rules
from onnxgrail.algebra.fit.compensate.grail import Grail
from onnxgrail.algebra.fit.refit import refit
from onnxgrail.algebra.moments.regression import error, moments
from onnxgrail.algebra.select.elimination import Remaining
from onnxgrail.algebra.select.quadratic import Quadratic
from onnxgrail.allocation.balance import balanced
from onnxgrail.allocation.ladders import ladder
from onnxgrail.allocation.schedules import flap
from onnxgrail.core import Floats, Reducer
from tests.unit.algebra_builders import mlp, view_of, weights_of

SEEDS = st.integers(0, 2**32 - 1)
KEPT, GONE = [0, 2, 3, 6], [1, 4, 5, 7]
ALL = Reducer(kept=np.arange(8))


def problem(seed: int, rows: int = 40) -> tuple[Floats, Floats]:
    """Correlated activations (n, 8) and the weights of their reader (8, 3)."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, 8)) @ rng.standard_normal((8, 8)), rng.standard_normal((8, 3))


def fit(z: Floats, t: Floats, start: Floats, alpha: float) -> Floats:
    """The ridge solution around a start, in sample: fitted and judged on the same rows, so that all of it is taken."""
    sums = moments(z, t)
    (found,) = refit([sums, sums], [[start]], Rules(affine=False, alphas=(alpha,)))
    assert (found.alpha, found.blend) == (alpha, 1.0)
    return found.weights


def one_by_one(gram: Floats, weights: Floats, lam: float) -> Floats:
    """Optimal brain surgeon: remove a row, spread it over those that are left, shrink the matrix; in any order."""
    alive, left = list(range(8)), weights.copy()
    for out in GONE:
        inverse = np.linalg.inv((gram + lam * np.eye(8))[np.ix_(alive, alive)])
        place = alive.index(out)
        left[alive] -= np.outer(inverse[:, place], left[out]) / inverse[place, place]
        alive.pop(place)
    return np.asarray(left[alive])


@pytest.mark.parametrize("alpha", [1e-3, 0.1])
def test_ridge_towards_the_pruned_weights_is_removal_one_by_one(alpha: float) -> None:
    x, weights = problem(0)
    gram = x.T @ x
    lam = 2 * alpha * float(np.trace(gram[np.ix_(KEPT, KEPT)])) / len(KEPT)  # twice: fitted and held rows together
    want = one_by_one(2 * gram, weights, lam)
    np.testing.assert_allclose(fit(x[:, KEPT], x @ weights, weights[KEPT], alpha), want, atol=1e-9)
    remaining = Remaining(Quadratic(matrix=2 * gram + lam * np.eye(8), columns=weights, members=1))
    remaining.open(len(GONE))
    for out in GONE:
        remaining.remove(np.array([out]))
    remaining.close(GONE)
    np.testing.assert_allclose(remaining.product, want @ want.T, atol=1e-9)


@settings(max_examples=25)
@given(seed=SEEDS, alpha=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 30.0]))
def test_ridge_towards_the_pruned_weights_never_loses_to_them(seed: int, alpha: float) -> None:
    x, weights = problem(seed)
    sums = moments(x[:, KEPT], x @ weights)
    found = fit(x[:, KEPT], x @ weights, weights[KEPT], alpha)
    zero = np.zeros((1, 3))
    assert error(sums, np.vstack([found, zero])) <= error(sums, np.vstack([weights[KEPT], zero]))


@pytest.mark.parametrize("alpha", [1e-3, 1.0])
def test_all_kept_are_left_alone(alpha: float) -> None:
    x, weights = problem(1)
    sums = moments(x, x @ weights)
    (found,) = refit([sums, sums], [[weights]], Rules(affine=True, alphas=(alpha,)))
    np.testing.assert_array_equal(found.weights, weights)


@pytest.mark.parametrize("alpha", [1e-3, 1e-6, 1e-9, 0.0])
def test_all_kept_are_given_back_by_grail(alpha: float) -> None:
    """The formula alone shrinks them by the ridge; what is no better than plain is not taken."""
    view = mlp(np.random.default_rng(2))
    np.testing.assert_allclose(weights_of(Grail(alpha=alpha)(view, ALL), view, 2), view.weights[2], atol=1e-6)


def test_every_target_is_met_best_by_the_fit_to_it() -> None:
    """Behind a residual: the narrowed stream carries `r`, the dense one carried `r_dense`, and its sum is wanted."""
    rng = np.random.default_rng(3)
    x_dense, weights = problem(3, rows=200)
    x = x_dense + 0.3 * rng.standard_normal(x_dense.shape)  # what comes through the narrowed network
    gap = 0.5 * rng.standard_normal((200, 3)) + 0.2 * x[:, :3]  # r_dense - r
    wanted = x_dense @ weights + gap
    targets = {"residual": wanted, "dense": x_dense @ weights, "own": x @ weights}
    z, left = x[:, KEPT], {}
    for name, target in targets.items():
        left[name] = float(np.square(wanted - z @ fit(z, target, weights[KEPT], 1e-12)).sum())
    grail = Grail(alpha=1e-12)(view_of([("consumer", weights[:, None, :])], [x]), Reducer(kept=np.array(KEPT)))
    plain = z @ dict(grail.weights)[0][:, 0]
    assert float(np.square(wanted - plain).sum()) == pytest.approx(left["own"], rel=1e-6)  # the published target
    assert left["residual"] < left["dense"]
    assert left["residual"] < left["own"]


@pytest.mark.parametrize("alpha", [1e-3, 0.1])
def test_a_free_bias_is_centring_both_sides(alpha: float) -> None:
    x, weights = problem(4)
    z, t = x[:, KEPT] + 1.0, x @ weights + 2.0
    start = np.random.default_rng(4).standard_normal((4, 3))
    sums = moments(z, t)
    (got,) = refit([sums, sums], [[start]], Rules(affine=True, alphas=(alpha,)))
    assert (got.alpha, got.blend) == (alpha, 1.0)
    centred, lam = z - z.mean(axis=0), alpha * np.square(z).sum() / 4
    want = np.linalg.solve(centred.T @ centred + lam * np.eye(4), centred.T @ (t - t.mean(axis=0)) + lam * start)
    np.testing.assert_allclose(got.weights, want, atol=1e-6)
    np.testing.assert_allclose(got.shift, t.mean(axis=0) - z.mean(axis=0) @ want, atol=1e-6)


@settings(max_examples=25)
@given(seed=SEEDS, share=st.floats(0.2, 0.95))
def test_one_threshold_over_heads_and_neurons_is_within_one_unit_of_the_budget(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    sizes = {"heads0": 8, "mlp0": 60, "heads1": 8, "mlp1": 60}
    prices = {name: 170 if name.startswith("heads") else 1 for name in sizes}
    ladders = [ladder(name, units, 1, 1) for name, units in sizes.items()]
    scores = {name: rng.standard_normal(units) for name, units in sizes.items()}

    def cost(widths: dict[str, int]) -> float:
        return float(sum(prices[name] * width for name, width in widths.items()))

    limit = share * cost(sizes)
    found = balanced(ladders, flap(ladders, scores), cost, limit)  # type: ignore[arg-type]
    if found.reached:
        assert 0 <= limit - cost(dict(found.widths)) < max(prices.values())
