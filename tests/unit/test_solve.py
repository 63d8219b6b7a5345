"""The ridge solve against dense formulas, and at every way out it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxgrail.algebra.solve import ridge
from onnxgrail.algebra.solve.linear import Host
from onnxgrail.algebra.solve.ridge import ridge_factor, ridge_solve, ridge_solver
from onnxgrail.core import Floats
from onnxgrail.errors import DataError


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh for every test, so that none depends on another."""
    return np.random.default_rng(20260223)


def spd(rng: np.random.Generator, k: int, rank: int | None = None) -> Floats:
    factor = rng.standard_normal((k, k if rank is None else rank))
    return factor @ factor.T


@pytest.mark.parametrize("lam", [0.0, 1e-3, 10.0])
def test_equals_the_dense_formula(lam: float, rng: np.random.Generator) -> None:
    gram, rhs = spd(rng, 6), rng.standard_normal((6, 3))
    got, used = ridge_solve(gram, rhs, lam)
    assert used == lam
    np.testing.assert_allclose((gram + lam * np.eye(6)) @ got, rhs, atol=1e-9)


@pytest.mark.parametrize(("ridge", "kind"), [(10.0, np.float32), (1e-3, np.float64)])
def test_float32_is_enough_where_the_ridge_allows_it(ridge: float, kind: type, rng: np.random.Generator) -> None:
    """A weak ridge on a singular matrix loses too much in float32."""
    gram, rhs = spd(rng, 300, rank=100).astype(np.float32), rng.standard_normal((300, 40))
    got, used = ridge_solve(gram, rhs, ridge)
    assert (got.dtype, used) == (kind, ridge)
    wide = gram.astype(np.float64) + ridge * np.eye(300)
    want = np.linalg.solve(wide, rhs)
    assert np.vdot(got - want, wide @ (got - want)) <= 1e-7 * np.vdot(want, rhs)


def test_a_float32_factor_also_serves_a_correction(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weak ridge of the test above, with one factorization."""
    factors: list[Any] = []
    cholesky = Host.cholesky
    monkeypatch.setattr(Host, "cholesky", lambda self, a: factors.append(a.dtype) or cholesky(self, a))
    gram, rhs = spd(rng, 300, rank=100).astype(np.float32), rng.standard_normal((300, 40))
    want = np.linalg.solve(gram.astype(np.float64) + 1e-2 * np.eye(300), rhs)
    solvers = ridge_factor(gram, 1e-2), ridge_solver(gram, 1e-2)
    for got in (ridge_solve(gram, rhs, 1e-2)[0], *(solve(rhs) for solve in solvers if solve)):
        assert got.dtype == np.float64
        assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
    assert factors == [np.float32] * 3


@pytest.mark.parametrize(("mean", "kind"), [(0.5, np.float32), (0.95, np.float64)])
def test_rows_in_float32_are_enough_where_their_weights_are_right(mean: float, kind: type) -> None:
    """The dual problem of rows with a common mean: judged by its own norm, the second would be good enough."""
    rng, ridge = np.random.default_rng(0), 1.0
    rows = (0.1 * rng.standard_normal((200, 220)) + mean).astype(np.float32)
    made = rng.standard_normal((200, 20))
    gram = rows @ rows.T
    assert ridge_solve(gram, made, ridge)[0].dtype == np.float32
    got, used = ridge_solve(gram, made, ridge, dual=True)
    assert (got.dtype, used) == (kind, ridge)
    x, wide = rows.astype(np.float64), gram.astype(np.float64)
    want = np.linalg.solve(wide + ridge * np.eye(200), made)
    off = x.T @ (got - want)
    lost = np.square(off).sum() * ridge + np.square(x @ off).sum()
    assert lost <= 1e-7 * np.vdot(wide @ want, made)


def test_arguments_are_left_alone(rng: np.random.Generator) -> None:
    gram, rhs = spd(rng, 4), rng.standard_normal((4, 2))
    before = gram.copy(), rhs.copy()
    ridge_solve(gram, rhs, 0.1)
    assert np.array_equal(gram, before[0])
    assert np.array_equal(rhs, before[1])


def test_singular_without_ridge_is_least_squares(rng: np.random.Generator) -> None:
    gram = spd(rng, 6, rank=3)
    wanted = gram @ rng.standard_normal((6, 2))  # in the range, so that an exact solution exists
    got, used = ridge_solve(gram, wanted, 0.0)
    assert used > 0.0
    np.testing.assert_allclose(gram @ got, wanted, atol=1e-6)
    assert np.abs(got).max() < 1e3


def test_equal_columns_do_not_explode() -> None:
    x = np.random.default_rng(1).standard_normal((50, 1)) @ np.ones((1, 4))
    got, _ = ridge_solve(x.T @ x, (x.T @ x)[:, :1], 0.0)
    np.testing.assert_allclose(got.sum(), 1.0, rtol=1e-6)
    assert np.abs(got).max() < 1.0


@pytest.mark.parametrize("seed", range(20))
def test_pivots_of_rounding_error_do_not_count(seed: int) -> None:
    gram = spd(np.random.default_rng(seed), 6, rank=3)  # LAPACK finds some of these positive definite
    got, used = ridge_solve(gram, np.random.default_rng(seed).standard_normal((6, 1)), 0.0)
    assert used > 0.0
    assert np.abs(got).max() <= 1.01 * np.sqrt(6) * 3.0 / (ridge.FLOOR * np.linalg.eigvalsh(gram)[-1])


def test_small_but_independent_channels_are_not_singular(rng: np.random.Generator) -> None:
    scale = np.array([1.0, 1e-9, 1e3])
    gram = np.diag(scale**2)
    rhs = rng.standard_normal((3, 2))
    got, used = ridge_solve(gram, rhs, 0.0)
    assert used == 0.0
    np.testing.assert_allclose(got, rhs / scale[:, None] ** 2, rtol=1e-12)


def test_ridge_grows_until_definite(rng: np.random.Generator) -> None:
    gram = np.diag([1.0, 2.0, -5e-3])  # indefinite by more than the first ridges
    rhs = rng.standard_normal((3, 1))
    got, used = ridge_solve(gram, rhs, 1e-4)
    assert used == pytest.approx(1e-2)
    np.testing.assert_allclose((gram + used * np.eye(3)) @ got, rhs, rtol=1e-10)


def test_ridge_stops_growing(rng: np.random.Generator) -> None:
    gram = np.diag([1.0, 2.0, -5.0])  # indefinite beyond six growths
    got, used = ridge_solve(gram, np.ones((3, 1)), 1e-7)
    assert used == pytest.approx(1e-7 + 2.0 * ridge.FLOOR, rel=1e-6)
    assert used > 1e-7
    np.testing.assert_allclose(got[:2, 0], [1.0, 0.5], rtol=1e-5)
    assert np.isfinite(got).all()


def test_nothing_at_all_is_zero() -> None:
    got, _ = ridge_solve(np.zeros((3, 3)), np.zeros((3, 2)), 0.0)
    assert np.array_equal(got, np.zeros((3, 2)))


def test_failing_eigenvalues_end_in_least_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Floats) -> None:
        raise np.linalg.LinAlgError

    monkeypatch.setattr(np.linalg, "eigh", fail)
    got, _ = ridge_solve(np.diag([2.0, 0.0]), np.array([[4.0], [0.0]]), 0.0)
    np.testing.assert_allclose(got, [[2.0], [0.0]], atol=1e-12)


@pytest.mark.parametrize("where", ["gram", "rhs", "lam", "negative"])
def test_bad_numbers_are_refused(where: str) -> None:
    gram, rhs, lam = np.eye(2), np.ones((2, 1)), 0.0
    if where == "gram":
        gram[1, 0] = np.nan
    elif where == "rhs":
        rhs[0] = np.inf
    else:
        lam = np.nan if where == "lam" else -1.0
    with pytest.raises(DataError, match="ridge solve"):
        ridge_solve(gram, rhs, lam)
