"""Wide matrices of few rows give what the whole matrices give."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from onnxgrail.algebra.fit.choice import Rules
from onnxgrail.algebra.fit.compensate.grail import Grail, fit
from onnxgrail.algebra.fit.normal import Normal
from onnxgrail.algebra.fit.refit import refit
from onnxgrail.algebra.fit.row_space import RowSpace
from onnxgrail.algebra.moments import few_rows
from onnxgrail.algebra.moments.regression import Moments, moments
from onnxgrail.core import Floats, Reducer, Stats
from tests.unit.algebra_builders import mlp, stats_of, weights_of

WIDE, FEW = 96, 20
PRUNED = Reducer(kept=np.array([1, 2, 4, 7]))
FOLDED = Reducer(kept=np.array([0, 1, 3, 5]), cluster=np.array([0, 1, 0, 2, 1, 3, 2, 2]))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow matrices count as wide."""
    monkeypatch.setattr(few_rows, "SIDE", 16)


def rows(count: int = FEW, width: int = WIDE, seed: int = 0) -> Floats:
    """Rows whose features differ in scale by a factor of a million; one of them is dead."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(count, width)) * 10.0 ** rng.uniform(-3, 3, width)
    found[:, 5] = 0.0
    return found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("rank", [1, 4, FEW])
def test_the_rows_give_the_matrix(rank: int) -> None:
    """Also where they depend on each other, so that there are fewer than said."""
    x = np.random.default_rng(1).normal(size=(FEW, rank)) @ rows(rank)
    gram = x.T @ x
    found = few_rows.rows_of(gram, FEW)
    assert found is not None
    assert len(found) == rank
    scale = np.sqrt(np.outer(gram.diagonal(), gram.diagonal()))
    np.testing.assert_array_less(np.abs(found.T @ found - gram), 1e-9 * scale + 1e-300)
    basis = few_rows.directions(found)
    np.testing.assert_allclose(basis.T @ basis, np.eye(rank), atol=1e-12)
    np.testing.assert_allclose(basis @ (basis.T @ x.T), x.T, atol=1e-9 * np.abs(x).max())


@pytest.mark.usefixtures("small")
def test_what_is_not_thin_is_said_to_be_none() -> None:
    """Of more rows than said, of many rows, and narrow ones."""
    x = rows(FEW + 1)
    assert few_rows.rows_of(x.T @ x, FEW) is None
    x = rows(WIDE // few_rows.SHARE + 1)
    assert few_rows.rows_of(x.T @ x, len(x)) is None
    x = rows(1, 8)
    assert few_rows.rows_of(x.T @ x, 1) is None


@pytest.mark.parametrize("alpha", [1e-1, 1e-3])
def test_the_ridge_solution_is_the_same(alpha: float) -> None:
    """With dead features, and with the errors before and after."""
    x, columns = rows(), np.random.default_rng(2).normal(size=(WIDE, 7))
    kept = np.arange(0, WIDE, 2)
    made, parts = x @ columns, ((0, slice(0, 3)), (1, slice(3, 7)))
    whole = Normal.of(
        (x.T @ made)[kept],
        gram=(x.T @ x)[np.ix_(kept, kept)],
        energy=np.square(made).sum(axis=0),
        plain=columns[kept],
        parts=parts,
    )
    lost = np.square(made - x[:, kept] @ columns[kept]).sum(axis=0)
    some = RowSpace(rows=x[:, kept], made=made, plain=columns[kept], lost=lost, parts=parts)
    want, got = fit(whole, alpha), fit(some, alpha)
    assert (got.better, got.damped) == (want.better, want.damped)
    np.testing.assert_allclose(got.weights, want.weights, rtol=1e-7, atol=1e-9 * np.abs(want.weights).max())
    np.testing.assert_allclose([some.lost, got.after], [whole.lost, want.after], rtol=1e-7)


@pytest.mark.parametrize("count", [20, 40, 200], ids=["few", "more", "many"])
@pytest.mark.parametrize("reducer", [PRUNED, FOLDED], ids=["prune", "fold"])
def test_kept_rows_give_what_their_products_give(reducer: Reducer, count: int) -> None:
    """Many rows are multiplied after all."""
    view, x = mlp(np.random.default_rng(4), members=6), np.maximum(rows(count, 48, 5), 0.0)
    few = Stats(gram=np.square(x).sum(axis=0), total=x.sum(axis=0), count=count, rows=x)
    views = (dataclasses.replace(view, stats=(stats,)) for stats in (stats_of(x), few))
    want, got = (Grail(alpha=1e-2)(one, reducer) for one in views)
    np.testing.assert_allclose(weights_of(got, view, 2), weights_of(want, view, 2), rtol=0, atol=1e-6)
    assert got.outcome == want.outcome
    for one, other in ((got.error.plain, want.error.plain), (got.error.compensated, want.error.compensated)):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def folds(outputs: int) -> tuple[list[Moments], Floats]:
    """Rows of four samples, made by weights with some noise, and these weights."""
    rng = np.random.default_rng(3)
    z = rng.normal(size=(4, 3, WIDE)) @ np.diag(10.0 ** rng.uniform(-1, 1, WIDE)) + 0.3
    true = rng.normal(size=(WIDE, outputs))
    t = z @ true + 0.5 + 0.01 * rng.normal(size=(4, 3, outputs))
    return [moments(a, b) for a, b in zip(z, t, strict=True)], true


@pytest.mark.parametrize("prior", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("judges", [1, 4])
def test_layers_are_fitted_the_same(monkeypatch: pytest.MonkeyPatch, prior: bool, affine: bool, judges: int) -> None:
    """Two layers side by side, one of them with two starts."""
    parts, true = folds(9)
    rng = np.random.default_rng(4)
    near, far = (true + size * rng.normal(size=true.shape) for size in (0.05, 1.0))
    layers = [[near[:, :4]], [far[:, 4:], near[:, 4:]]]

    def fitted() -> list[tuple[Floats, Floats, tuple[float | None, ...]]]:
        found = refit(parts, layers, Rules(affine=affine, judges=judges, prior=prior))
        return [(f.weights, f.shift, (f.start, f.alpha, f.blend, f.before, f.after)) for f in found]

    want = fitted()
    monkeypatch.setattr(few_rows, "SIDE", 16)
    got = fitted()
    assert any(facts[1] for _, _, facts in want)
    for (weights, shift, facts), (other, others, same) in zip(want, got, strict=True):
        np.testing.assert_allclose(other, weights, atol=1e-7)
        np.testing.assert_allclose(others, shift, atol=1e-7)
        np.testing.assert_allclose(np.array(same, float), np.array(facts, float), rtol=1e-6, atol=1e-9)
