"""Compensation against the naive formulas, its guards, and the glue of reduce_and_compensate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onnxgrail.algebra.fit.compensate import COMPENSATORS
from onnxgrail.algebra.fit.compensate.grail import Grail
from onnxgrail.algebra.fit.compensate.plain import Plain
from onnxgrail.algebra.method import reduce_and_compensate
from onnxgrail.algebra.moments.gram import zero_stats
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.core import Change, Floats, Reducer, View
from onnxgrail.errors import UsageError
from tests.unit.algebra_builders import gram_of, matrix_of, mlp, probe_of, stats_of, view_of, weights_of

PRUNED = Reducer(kept=np.array([1, 2, 4, 7]))
FOLDED = Reducer(kept=np.array([0, 1, 3, 5]), cluster=np.array([0, 1, 0, 2, 1, 3, 2, 2]))
BOTH = pytest.mark.parametrize("reducer", [PRUNED, FOLDED], ids=["prune", "fold"])


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh for every test, so that none depends on another."""
    return np.random.default_rng(20260223)


def naive(gram: Floats, columns: Floats, lifted: Floats, alpha: float) -> Floats:
    """C' = Bᵀ C with B = G Rᵀ (R G Rᵀ + λI)⁻¹ formed in full."""
    inner = lifted @ gram @ lifted.T
    ridge = alpha * np.mean(np.diag(inner)) * np.eye(len(inner))
    return (gram @ lifted.T @ np.linalg.inv(inner + ridge)).T @ columns


def lift(reducer: Reducer, members: int) -> Floats:
    """R (x) I over the members of each unit."""
    return np.kron(matrix_of(reducer, 8), np.eye(members)).astype(np.float64)


def output_error(rows: Floats, old: Floats, lifted: Floats, new: Floats) -> float:
    """Relative squared error from the outputs themselves."""
    return float(((rows @ old - rows @ lifted.T @ new) ** 2).sum() / ((rows @ old) ** 2).sum())


@BOTH
def test_moments_in_float32_give_the_same_weights_and_errors(reducer: Reducer, rng: np.random.Generator) -> None:
    view = mlp(rng, members=3)
    stats = tuple(replace(one, gram=one.gram.astype(np.float32)) for one in view.stats)
    want, got = (Grail(alpha=1e-2)(one, reducer) for one in (view, replace(view, stats=stats)))
    scale = np.abs(weights_of(want, view, 2)).max()
    np.testing.assert_allclose(weights_of(got, view, 2), weights_of(want, view, 2), rtol=0, atol=1e-4 * scale)
    np.testing.assert_allclose(
        [got.error.plain, got.error.compensated], [want.error.plain, want.error.compensated], rtol=1e-4
    )


@BOTH
@pytest.mark.parametrize("alpha", [1e-3, 0.05, 0.0])
@pytest.mark.parametrize("members", [1, 3])
def test_grail_equals_the_formula(reducer: Reducer, alpha: float, members: int, rng: np.random.Generator) -> None:
    view = mlp(rng, members=members)
    lifted = lift(reducer, members)
    old = view.weights[2].reshape(8 * members, -1)
    change = Grail(alpha=alpha)(view, reducer)
    want = naive(view.stats[0].gram, old, lifted, alpha)
    got = weights_of(change, view, 2)
    assert got.shape == (4, members, 5)
    np.testing.assert_allclose(got.reshape(4 * members, -1), want, rtol=0, atol=1e-10 * np.abs(want).max())
    assert change.outcome.status == "ok"


@BOTH
def test_pooled_equals_the_lifted_formula(reducer: Reducer, rng: np.random.Generator) -> None:
    maps = rng.standard_normal((30, 8, 3)) @ rng.standard_normal((3, 3)) + 0.4 * rng.standard_normal((8, 1))
    probe = probe_of(8, 3, pooled=True)
    samples = maps.transpose(0, 2, 1).reshape(-1, 8)
    weight = rng.standard_normal((8, 3, 4))
    view = view_of([("consumer", weight)], [samples], pooled=[True])
    view = replace(view, stats=(gram_of(maps.reshape(30, 24), probe),))
    change = Grail(alpha=1e-2)(view, reducer)
    # The same (u, k) map at each position: one u-by-u system whose columns are the positions.
    want = naive(samples.T @ samples, weight.reshape(8, -1), matrix_of(reducer, 8), 1e-2).reshape(4, 3, 4)
    np.testing.assert_allclose(weights_of(change, view, 0), want, atol=1e-11)
    # ... which on all positions together is M (x) I: its second moments are blocks of the pooled ones.
    moments: Floats = np.kron(samples.T @ samples, np.eye(3)).astype(np.float64)
    wide = naive(moments, weight.reshape(24, 4), lift(reducer, 3), 1e-2)
    np.testing.assert_allclose(weights_of(change, view, 0).reshape(12, 4), wide, atol=1e-11)


def test_pruning_by_itself_changes_no_weight(rng: np.random.Generator) -> None:
    assert Plain()(mlp(rng), PRUNED).weights == ()


@pytest.mark.parametrize("name", COMPENSATORS)
def test_folding_averages_producers_and_passengers(name: str, rng: np.random.Generator) -> None:
    view = mlp(rng, members=2)
    change = COMPENSATORS[name](view, FOLDED)
    for slot in (0, 1):
        want = np.tensordot(matrix_of(FOLDED, 8), view.weights[slot], 1)
        np.testing.assert_allclose(weights_of(change, view, slot), want, atol=1e-14)


def test_fold_that_joins_nothing_changes_nothing(rng: np.random.Generator) -> None:
    assert Plain()(mlp(rng), Reducer(kept=np.arange(8), cluster=np.arange(8))).weights == ()


def test_folding_sums_consumers(rng: np.random.Generator) -> None:
    view = mlp(rng, members=2)
    want = np.tensordot(matrix_of(FOLDED, 8) > 0, view.weights[2], 1)
    np.testing.assert_allclose(weights_of(Plain()(view, FOLDED), view, 2), want, atol=1e-14)


@BOTH
def test_white_activations_without_ridge_give_the_plain_result(reducer: Reducer, rng: np.random.Generator) -> None:
    view = mlp(rng)
    view = replace(view, stats=(replace(view.stats[0], gram=7.0 * np.eye(8)),))
    plain, grail = Plain()(view, reducer), Grail(alpha=0.0)(view, reducer)
    for slot in range(3):
        np.testing.assert_allclose(weights_of(grail, view, slot), weights_of(plain, view, slot), rtol=1e-14, atol=1e-14)
    assert plain.error.plain == pytest.approx(grail.error.compensated)
    assert grail.outcome.status == "ok"


@BOTH
def test_errors_are_those_of_the_outputs(reducer: Reducer, rng: np.random.Generator) -> None:
    rows = rng.standard_normal((40, 8)) @ rng.standard_normal((8, 8))
    first, second = rng.standard_normal((8, 1, 3)), rng.standard_normal((8, 1, 5))
    view = view_of([("consumer", first), ("consumer", second)], [rows])
    change = Grail()(view, reducer)
    lifted, old = matrix_of(reducer, 8), np.concatenate([first[:, 0], second[:, 0]], axis=1)
    sliced = (lifted > 0) @ old
    new = np.concatenate([weights_of(change, view, s)[:, 0] for s in (0, 1)], axis=1)
    assert change.error.plain == pytest.approx(output_error(rows, old, lifted, sliced), rel=1e-9)
    assert change.error.compensated == pytest.approx(output_error(rows, old, lifted, new), rel=1e-9)
    assert Plain()(view, reducer).error.plain == pytest.approx(change.error.plain)
    assert Plain()(view, reducer).error.compensated is None


def test_consumers_see_their_own_probe(rng: np.random.Generator) -> None:
    rows = [rng.standard_normal((30, 8)) @ rng.standard_normal((8, 8)) for _ in range(2)]
    weights = [rng.standard_normal((8, 1, 3)) for _ in range(3)]
    view = view_of([("consumer", w) for w in weights], rows, feeds=[1, 0, 1])
    change = Grail()(view, PRUNED)
    for slot, feed in enumerate([1, 0, 1]):
        want = naive(rows[feed].T @ rows[feed], weights[slot][:, 0], matrix_of(PRUNED, 8), 1e-3)
        np.testing.assert_allclose(weights_of(change, view, slot)[:, 0], want, atol=1e-10)
    assert [number for number, _ in change.weights] == [0, 1, 2]


def test_consumer_that_would_get_worse_keeps_its_plain_weights(rng: np.random.Generator) -> None:
    good, white = rng.standard_normal((40, 2)) @ rng.standard_normal((2, 8)), np.linalg.qr(rng.standard_normal((20, 8)))
    weights = rng.standard_normal((8, 1, 3))
    view = view_of([("consumer", weights), ("consumer", weights)], [good, white.Q], feeds=[0, 1])
    change = Grail(alpha=0.5)(view, PRUNED)
    assert [number for number, _ in change.weights] == [0]
    assert change.outcome.status == "ok"
    assert "1 of 2 consumers" in change.outcome.reason


def test_nothing_gained_is_reported_as_plain(rng: np.random.Generator) -> None:
    view = mlp(rng)
    view = replace(view, stats=(replace(view.stats[0], gram=np.eye(8)),))
    change = Grail(alpha=0.5)(view, PRUNED)
    assert change.weights == ()
    assert change.outcome.status == "plain"
    assert "does not lower the error" in change.outcome.reason
    assert change.error.compensated == change.error.plain


def test_singular_moments_without_ridge_are_damped(rng: np.random.Generator) -> None:
    few = rng.standard_normal((2, 8))
    view = view_of([("consumer", rng.standard_normal((8, 1, 3)))], [few])
    change = Grail(alpha=0.0)(view, PRUNED)
    assert change.outcome.status == "damped"
    assert "larger ridge" in change.outcome.reason
    assert change.error.compensated is not None
    assert change.error.compensated < 1e-6  # four features explain two rows
    assert np.abs(weights_of(change, view, 0)).max() < 1e3


@BOTH
@pytest.mark.parametrize("alpha", [0.0, 1e-3])
def test_silent_channels_keep_plain_weights(reducer: Reducer, alpha: float, rng: np.random.Generator) -> None:
    rows = rng.standard_normal((40, 8))
    rows[:, [0, 2, 4]] = 0.0  # cluster 0 of the fold, and the third kept unit of the pruning
    view = view_of([("consumer", rng.standard_normal((8, 1, 3)))], [rows])
    change = Grail(alpha=alpha)(view, reducer)
    silent = 2 if reducer is PRUNED else 0
    plain = weights_of(Plain()(view, reducer), view, 0)
    np.testing.assert_allclose(weights_of(change, view, 0)[silent], plain[silent], atol=1e-14)
    assert all(np.isfinite(w).all() for _, w in change.weights)
    assert change.outcome.status == "ok"


@BOTH
def test_no_activity_at_all_is_plain(reducer: Reducer, rng: np.random.Generator) -> None:
    view = mlp(rng)
    for stats in (zero_stats(view.block.probes[0]), stats_of(np.zeros((5, 8)))):
        silent = replace(view, stats=(stats,))
        change, plain = Grail()(silent, reducer), Plain()(silent, reducer)
        assert change.outcome.status == "plain"
        assert "nothing but zeros" in change.outcome.reason
        assert change.error.plain is None
        assert plain.error.plain is None
        for slot in range(3):
            assert np.array_equal(weights_of(change, silent, slot), weights_of(plain, silent, slot))


def test_kept_channels_silent_is_plain(rng: np.random.Generator) -> None:
    rows = np.zeros((5, 8))
    rows[:, 0] = 1.0
    change = Grail()(view_of([("consumer", rng.standard_normal((8, 1, 3)))], [rows]), PRUNED)
    assert change.outcome.status == "plain"
    assert change.error.plain == change.error.compensated == pytest.approx(1.0)


def test_moments_that_are_not_finite_are_plain(rng: np.random.Generator) -> None:
    view = mlp(rng)
    gram = view.stats[0].gram.copy()
    gram[0, 0] = np.nan
    change = Grail()(replace(view, stats=(replace(view.stats[0], gram=gram),)), FOLDED)
    assert change.outcome.status == "plain"
    assert "NaN" in change.outcome.reason
    assert all(np.isfinite(w).all() for _, w in change.weights)


def test_grail_without_data_says_so(rng: np.random.Generator) -> None:
    with pytest.raises(UsageError, match=r"'block' needs activation statistics.*none"):
        Grail()(replace(mlp(rng), stats=()), PRUNED)
    assert Plain()(replace(mlp(rng), stats=()), FOLDED).error.plain is None


@pytest.mark.parametrize("alpha", [-1e-3, float("nan"), float("inf")])
def test_impossible_ridge_is_refused(alpha: float) -> None:
    with pytest.raises(UsageError, match="ridge"):
        Grail(alpha=alpha)


def test_weight_that_does_not_fit_its_probe_is_refused(rng: np.random.Generator) -> None:
    view = mlp(rng, units=8, members=2)
    probe = replace(view.block.probes[0], index=np.arange(8)[:, None])
    with pytest.raises(ValueError, match=r"'w2' has \(8, 2\)"):
        Grail()(replace(view, block=replace(view.block, probes=(probe,))), PRUNED)


@BOTH
def test_duplicated_channels_are_recovered(reducer: Reducer, rng: np.random.Generator) -> None:
    basis = rng.standard_normal((50, 4))
    twin = np.zeros(8, np.int64)
    twin[[1, 2, 4, 7, 0, 3, 5, 6]] = [0, 1, 2, 3, 0, 1, 2, 3]
    rows = basis[:, twin if reducer is PRUNED else np.array(FOLDED.cluster)]
    view = view_of([("consumer", rng.standard_normal((8, 1, 3)))], [rows])
    assert Grail(alpha=0.0)(view, reducer).error.compensated == pytest.approx(0.0, abs=1e-12)
    if reducer is PRUNED:
        assert (Plain()(view, reducer).error.plain or 0.0) > 0.1
    else:  # summing the consumers of equal channels is already exact
        assert Plain()(view, reducer).error.plain == pytest.approx(0.0, abs=1e-12)


def test_linear_dependence_is_recovered(rng: np.random.Generator) -> None:
    rows = rng.standard_normal((50, 4)) @ rng.standard_normal((4, 8))
    view = view_of([("consumer", rng.standard_normal((8, 1, 3)))], [rows])
    assert (Plain()(view, PRUNED).error.plain or 0.0) > 0.1
    assert Grail(alpha=0.0)(view, PRUNED).error.compensated == pytest.approx(0.0, abs=1e-12)
    tiny = Grail(alpha=1e-8)(view, PRUNED).error.compensated
    assert tiny == pytest.approx(0.0, abs=1e-6)


def method(
    view: View, kept: int, *, selector: str = "wanda", reducer: str = "prune", compensate: str = "grail"
) -> Change:
    return reduce_and_compensate(
        view,
        kept,
        selector=SELECTORS[selector],
        reducer=REDUCERS[reducer],
        compensator=COMPENSATORS[compensate],
        rng=np.random.default_rng(0),
    )


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("compensate", COMPENSATORS)
@pytest.mark.parametrize("kept", [1, 3, 8])
def test_every_combination(selector: str, reducer: str, compensate: str, kept: int) -> None:
    view = mlp(np.random.default_rng(5), members=2)
    first, second = (method(view, kept, selector=selector, reducer=reducer, compensate=compensate) for _ in range(2))
    assert len(first.reducer.kept) == kept
    assert first.block is view.block
    for (slot, got), (other, again) in zip(first.weights, second.weights, strict=True):
        assert slot == other
        assert np.array_equal(got, again)
        assert got.dtype == np.float64
        assert got.shape == (kept, *view.weights[slot].shape[1:])
        assert np.isfinite(got).all()


@pytest.mark.parametrize("reducer", REDUCERS)
def test_full_width_changes_nothing_and_needs_no_data(reducer: str, rng: np.random.Generator) -> None:
    change = method(replace(mlp(rng), stats=()), 8, reducer=reducer)
    assert change.weights == ()
    assert change.reducer.kept.tolist() == list(range(8))
    assert change.reducer.cluster is None


@pytest.mark.parametrize("kept", [0, 9])
def test_impossible_width_is_refused(kept: int, rng: np.random.Generator) -> None:
    with pytest.raises(UsageError, match=f"8 units, of which {kept}"):
        method(mlp(rng), kept)


def test_fold_asks_no_selector(rng: np.random.Generator) -> None:
    view = replace(mlp(rng), stats=())
    assert len(method(view, 3, reducer="fold", compensate="none").reducer.kept) == 3
    with pytest.raises(UsageError, match="statistics"):
        method(view, 3, reducer="prune", compensate="none")


def test_one_silent_unit_among_many(rng: np.random.Generator) -> None:
    view = mlp(rng)
    keep = np.diag(np.arange(8) != 3).astype(float)
    stats = replace(view.stats[0], gram=keep @ view.stats[0].gram @ keep)
    change = method(replace(view, stats=(stats,)), 7)
    assert 3 not in change.reducer.kept
    assert change.error.plain == pytest.approx(0.0, abs=1e-12)
