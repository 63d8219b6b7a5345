"""Fits of consumers against least squares written out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgrail.algebra.fit import refit as module
from onnxgrail.algebra.fit.choice import ALPHAS, Choice, Fitted, Rules
from onnxgrail.algebra.moments.cross import TOGETHER, Pairs, moments_of
from onnxgrail.algebra.moments.regression import Moments, error, moments, zero_moments
from onnxgrail.algebra.moments.triangles import unpacked
from onnxgrail.algebra.solve.ridge import ridge_factor
from onnxgrail.core import Floats


def data(
    rows: int = 60, features: int = 5, outputs: int = 3, *, noise: float = 0.0, seed: int = 0
) -> tuple[Floats, Floats]:
    """Regressors and targets that depend on them linearly, with a constant and noise."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(rows, features)) + 1.0
    t = z @ rng.normal(size=(features, outputs)) + rng.normal(size=outputs) + noise * rng.normal(size=(rows, outputs))
    return z, t


def halves(z: Floats, t: Floats) -> tuple[Moments, Moments]:
    """Every fourth row held out."""
    held = np.arange(len(z)) % 4 == 3
    return moments(z[~held], t[~held]), moments(z[held], t[held])


def refit(fit: Moments, held: Moments, starts: list[Floats], **options: Any) -> Fitted:
    """The fit of one layer."""
    (found,) = module.refit([fit, held], [starts], Rules(**options))
    return found


def direct(z: Floats, t: Floats, start: Floats, alpha: float, *, affine: bool) -> tuple[Floats, Floats]:
    """Rows of the penalty stacked under the data, and numpy's own least squares."""
    features = z.shape[1]
    lam = alpha * np.square(z).sum() / features
    wide = np.concatenate([z, np.ones((len(z), 1))], axis=1) if affine else z
    rest = t - z @ start
    penalty = np.zeros((features, wide.shape[1]))
    penalty[:, :features] = np.sqrt(lam) * np.eye(features)
    stacked = np.concatenate([wide, penalty]), np.concatenate([rest, np.zeros((features, t.shape[1]))])
    step = np.linalg.lstsq(*stacked, rcond=None)[0]
    return start + step[:features], step[features] if affine else np.zeros(t.shape[1])


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("alpha", [1e-3, 0.3])
def test_equals_least_squares_on_all_rows(alpha: float, *, affine: bool) -> None:
    z, t = data(noise=0.5)
    start = np.random.default_rng(1).normal(size=(5, 3))
    found = refit(*halves(z, t), [start], affine=affine, alphas=(alpha,))
    weights, shift = direct(z, t, start, alpha, affine=affine)
    assert found.alpha == alpha
    assert 0.0 < found.blend <= 1.0
    np.testing.assert_allclose(found.weights, start + found.blend * (weights - start), atol=1e-6)
    np.testing.assert_allclose(found.shift, found.blend * shift, atol=1e-6)


def test_the_share_of_the_step_is_the_best_on_held_out_rows() -> None:
    """Against all shares of a fine grid, each with its error written out."""
    z, t = data(rows=28, features=12, noise=4.0)
    start = np.zeros((12, 3))
    fitted, kept = np.arange(28) % 4 != 3, np.arange(28) % 4 == 3
    found = refit(*halves(z, t), [start], affine=False, alphas=(1e-3,))
    step, _ = direct(z[fitted], t[fitted], start, 1e-3, affine=False)
    gaps = [np.square(t[kept] - share * z[kept] @ step).sum() for share in np.linspace(0.0, 1.0, 1001)]
    assert 0.05 < found.blend < 0.95
    assert found.blend == pytest.approx(np.argmin(gaps) / 1000, abs=1e-3)
    assert found.after == pytest.approx(min(gaps) / np.square(t[kept]).sum(), rel=1e-5)


def test_layers_that_read_the_same_rows_are_fitted_as_if_alone() -> None:
    z, t = data(outputs=5, noise=1.0)
    start = np.random.default_rng(1).normal(size=(5, 5))
    fit, held = halves(z, t)
    layers = [[start[:, :2]], [start[:, 2:], 0.5 * start[:, 2:]]]
    together = module.refit([fit, held], layers, Rules(affine=True))
    for one, part in zip(together, (slice(0, 2), slice(2, 5)), strict=True):
        starts = [start[:, part]] if part.start == 0 else [start[:, part], 0.5 * start[:, part]]
        alone = refit(*halves(z, t[:, part]), starts, affine=True)
        assert (one.alpha, one.blend) == (alone.alpha, pytest.approx(alone.blend))
        np.testing.assert_allclose(one.weights, alone.weights, atol=1e-9)


def test_a_linear_dependence_is_found_exactly() -> None:
    z, t = data()
    found = refit(*halves(z, t), [np.zeros((5, 3))], affine=True, alphas=(1e-10,))
    np.testing.assert_allclose(z @ found.weights + found.shift, t, atol=1e-6)
    assert found.after < 1e-12 < found.before


def test_a_strong_ridge_is_the_start() -> None:
    z, t = data(noise=0.1)
    start = np.random.default_rng(1).normal(size=(5, 3))
    found = refit(*halves(z, t), [start], affine=False, alphas=(1e9,))
    np.testing.assert_allclose(found.weights, start, atol=1e-6)


def test_a_fit_that_does_not_hold_up_is_not_taken() -> None:
    """More regressors than rows, and targets that have nothing to do with them."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=(40, 2))
    z = rng.normal(size=(24, 40))
    t = z @ start + 0.01 * rng.normal(size=(24, 2))
    t[3::4] = z[3::4] @ start  # on held-out rows nothing is left to be won
    found = refit(*halves(z, t), [start], affine=True, alphas=(1e-6,))
    assert found.alpha is None
    np.testing.assert_array_equal(found.weights, start)
    assert not found.shift.any()
    assert found.after == found.before


def test_the_better_start_is_chosen() -> None:
    z, t = data(noise=0.01)
    good, _ = direct(z, t, np.zeros((5, 3)), 0.0, affine=False)
    found = refit(*halves(z, t), [np.zeros((5, 3)), good], affine=False, alphas=(1e6,))
    np.testing.assert_allclose(found.weights, good, atol=1e-4)


def test_no_rows_keep_the_start() -> None:
    start = np.ones((5, 3))
    found = refit(zero_moments(5, 3), zero_moments(5, 3), [start], affine=True)
    np.testing.assert_array_equal(found.weights, start)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.booleans())
def test_never_worse_than_the_start_on_held_out_rows(seed: int, affine: bool) -> None:
    z, t = data(rows=20, noise=1.0, seed=seed)
    start = np.random.default_rng(seed).normal(size=(5, 3))
    fit, held = halves(z, t)
    found = refit(fit, held, [start], affine=affine)
    assert found.after <= found.before


def test_without_prior_the_ridge_pulls_towards_zero() -> None:
    z, t = data(noise=0.5)
    start = np.random.default_rng(1).normal(size=(5, 3))
    found = refit(*halves(z, t), [start], affine=True, prior=False, blend=False, alphas=(0.3,))
    weights, shift = direct(z, t, np.zeros((5, 3)), 0.3, affine=True)
    assert found.blend == 1.0
    np.testing.assert_allclose(found.weights, weights, atol=1e-6)
    np.testing.assert_allclose(found.shift, shift, atol=1e-6)


def test_folds_held_out_in_turn() -> None:
    """The share of the step that is best for all folds together, each judged by what the others give."""
    z, t = data(rows=32, features=12, noise=1.5)
    start, fold = np.zeros((12, 3)), np.arange(32) % 4
    folds = [moments(z[fold == f], t[fold == f]) for f in range(4)]
    (found,) = module.refit(folds, [[start]], Rules(affine=False, judges=4, alphas=(1e-3,)))
    steps = [direct(z[fold != f], t[fold != f], start, 1e-3, affine=False)[0] for f in range(4)]
    shares = np.linspace(0.0, 1.0, 1001)
    gaps = [sum(np.square(t[fold == f] - s * z[fold == f] @ steps[f]).sum() for f in range(4)) for s in shares]
    assert found.blend == pytest.approx(shares[np.argmin(gaps)], abs=1e-3)
    assert found.after == pytest.approx(min(gaps) / np.square(t).sum(), rel=1e-5)
    whole, _ = direct(z, t, start, 1e-3, affine=False)
    np.testing.assert_allclose(found.weights, found.blend * whole, atol=1e-6)


def test_one_fold_that_loses_forbids_the_fit() -> None:
    z, t = data(rows=32, noise=0.1)
    fold = np.arange(32) % 4
    t[fold == 2] = 0.0  # as the start has it
    folds = [moments(z[fold == f], t[fold == f]) for f in range(4)]
    for judges, taken in ((1, True), (4, False)):
        (found,) = module.refit(folds, [[np.zeros((5, 3))]], Rules(affine=True, judges=judges))
        assert (found.alpha is not None) == taken


def test_errors_by_definition_and_sums_that_add_up() -> None:
    z, t = data(noise=1.0)
    weights = np.random.default_rng(2).normal(size=(6, 3))
    gaps = t - np.concatenate([z, np.ones((len(z), 1))], axis=1) @ weights
    fit, held = halves(z, t)
    assert error(fit + held, weights) == pytest.approx(np.square(gaps).sum())
    assert (fit + held).count == len(z)


@pytest.mark.parametrize(
    ("gains", "searched", "likely"),
    [
        ([2e-5, 1e-5, 9e-6, 8e-6], 3, 0.0),  # a trace that falls
        ([0.0, 0.0, 0.0, 0.2], 4, 1e-4),  # what gains nothing says nothing: a few features may be huge
        ([1e-5, 1e-4, 1e-3, 1e-2, 0.2, 0.2], 6, 1e-5),  # a trace that grows
        ([0.06, 0.05, 0.04], 3, 1e-1),  # on few outputs half of the margin is enough
        ([0.04, 0.03, 0.02], 3, 0.0),
        ([0.3, 0.2, 0.4], 3, 1e-3),  # a dip
    ],
)
def test_how_far_ridges_are_searched(gains: list[float], searched: int, likely: float) -> None:
    z, t = data(noise=0.5)
    fit, held = halves(z, t)
    choice = Choice.among([np.zeros((5, 3))], fit + held, held, [held], Rules(affine=False, margin=0.1))
    seen = 0
    for alpha, gain in zip(ALPHAS, gains, strict=False):
        if not choice.searching:
            break
        choice.slopes[:] = choice.curves[:] = gain * choice.begin  # a step of length 1 gains as much
        choice.note(alpha)
        seen += 1
    assert (seen, choice.likely) == (searched, likely)


@pytest.mark.parametrize("alpha", [1e-1, 1e-5])
def test_float32_sums_give_the_same_fit(alpha: float) -> None:
    z, t = data(rows=400, features=30, noise=0.5)
    start = np.random.default_rng(1).normal(size=(30, 3))
    wide = halves(z, t)
    single = [replace(f, gram=f.gram.astype(np.float32), cross=f.cross.astype(np.float32)) for f in wide]
    want, got = (refit(*folds, [start], affine=True, alphas=(alpha,)) for folds in (wide, single))
    assert (got.alpha, got.weights.dtype) == (alpha, np.float32)
    assert (got.blend, got.before, got.after) == pytest.approx((want.blend, want.before, want.after), rel=1e-4)
    np.testing.assert_allclose(got.weights, want.weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("features", "kind"), [(1025, np.float32), (1024, np.float64)])
def test_sums_over_many_rows_leave_in_float32_where_features_are_many(features: int, kind: type) -> None:
    rng = np.random.default_rng(0)
    pairs = Pairs(features, 2)
    z, t = (rng.standard_normal((TOGETHER, width), dtype=np.float32) for width in (features, 2))
    for _ in range(2):
        pairs.add(z, t)
    gram, cross, *small = pairs.drain()
    made = moments_of(unpacked(gram, features), cross, *small)
    assert (made.gram.dtype, made.cross.dtype, made.count) == (kind, kind, 2 * TOGETHER)
    np.testing.assert_allclose(made.cross[:-1], 2 * z.T.astype(np.float64) @ t, rtol=0, atol=1e-2)


def test_a_singular_system_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of the ridges above it is taken."""
    z, t = data(rows=40, noise=0.1)
    every = refit(*halves(z, t), [np.zeros((5, 3))], affine=True)
    assert every.alpha is not None
    assert every.alpha < 1e-2
    least = 5e-3 * np.square(z[np.arange(40) % 4 != 3]).sum() / 5
    seen: list[float] = []

    def factor(gram: Floats, ridge: Floats) -> Any:
        seen.append(float(ridge[0]))
        return None if ridge[0] < least else ridge_factor(gram, ridge)

    monkeypatch.setattr(module, "ridge_factor", factor)
    found = refit(*halves(z, t), [np.zeros((5, 3))], affine=True)
    assert found.alpha == 1e-2
    assert len(seen) < 7
