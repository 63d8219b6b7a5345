"""Laws of the numeric code that hold for all blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgrail.algebra.fit.compensate.grail import Grail
from onnxgrail.algebra.fit.compensate.plain import Plain
from onnxgrail.algebra.fold.kmeans import kmeans
from onnxgrail.algebra.moments.gram import Sums
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.algebra.solve.ridge import ridge_solve
from onnxgrail.core import Reducer, View
from tests.unit.algebra_builders import gram_of, matrix_of, mlp, probe_of, view_of, weights_of

SEEDS = st.integers(0, 2**32 - 1)
QUICK = settings(max_examples=25)


def reducer_for(view: View, kept: int, name: str, seed: int) -> Reducer:
    rng = np.random.default_rng(seed)
    return REDUCERS[name](view, kept, rng.random(view.block.units), rng)


@QUICK
@given(seed=SEEDS, cuts=st.lists(st.integers(0, 12), max_size=3), pooled=st.booleans(), images=st.booleans())
def test_batches_may_be_cut_anywhere(seed: int, cuts: list[int], pooled: bool, images: bool) -> None:
    x = np.random.default_rng(seed).standard_normal((12, 6, 2, 2) if images else (12, 6))
    probe = probe_of(3, 2, pooled=pooled)
    whole = gram_of(x, probe)
    sums = Sums(probe)
    for part in np.split(x, sorted(cuts)):
        sums.add(part, probe)
    parts = sums.stats()
    assert parts.count == whole.count
    np.testing.assert_allclose(parts.gram, whole.gram, atol=1e-11)
    np.testing.assert_allclose(parts.total, whole.total, atol=1e-11)


@QUICK
@given(seed=SEEDS, scale=st.sampled_from([1e-6, 0.1, 3.0, 1e6]), fold=st.booleans())
def test_ridge_does_not_see_the_scale_of_activations(seed: int, scale: float, fold: bool) -> None:
    view = mlp(np.random.default_rng(seed))
    reducer = reducer_for(view, 5, "fold" if fold else "prune", seed)
    scaled = replace(view, stats=(replace(view.stats[0], gram=scale * view.stats[0].gram),))
    here, there = Grail()(view, reducer), Grail()(scaled, reducer)
    np.testing.assert_allclose(weights_of(there, view, 2), weights_of(here, view, 2), rtol=1e-6, atol=1e-8)


@QUICK
@given(seed=SEEDS, kept=st.integers(1, 7), fold=st.booleans(), alpha=st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 1e3]))
def test_compensation_is_never_worse_on_its_own_data(seed: int, kept: int, fold: bool, alpha: float) -> None:
    rng = np.random.default_rng(seed)
    view = mlp(rng, members=int(rng.integers(1, 3)), rows=int(rng.integers(1, 30)))
    change = Grail(alpha=alpha)(view, reducer_for(view, kept, "fold" if fold else "prune", seed))
    if change.error.plain is not None and change.error.compensated is not None:
        assert change.error.compensated <= change.error.plain + 1e-11
        assert change.error.compensated >= 0.0
    assert all(np.isfinite(w).all() for _, w in change.weights)


@QUICK
@given(seed=SEEDS, kept=st.integers(1, 7), fold=st.booleans())
def test_no_other_weights_beat_the_unridged_ones(seed: int, kept: int, fold: bool) -> None:
    rng = np.random.default_rng(seed)
    view = mlp(rng)
    rows = rng.standard_normal((40, 8)) @ rng.standard_normal((8, 8))
    view = replace(view, stats=(replace(view.stats[0], gram=rows.T @ rows),))
    reducer = reducer_for(view, kept, "fold" if fold else "prune", seed)
    change = Grail(alpha=0.0)(view, reducer)
    narrow, target = rows @ matrix_of(reducer, 8).T, rows @ view.weights[2][:, 0]
    best = np.linalg.lstsq(narrow, target, rcond=None)[0]
    ours = weights_of(change, view, 2)[:, 0]
    energy = (target**2).sum()
    assert ((narrow @ ours - target) ** 2).sum() <= ((narrow @ best - target) ** 2).sum() + 1e-9 * energy


@QUICK
@given(seed=SEEDS, kept=st.integers(1, 8), fold=st.booleans(), members=st.integers(1, 2))
def test_white_activations_give_plain_weights(seed: int, kept: int, fold: bool, members: int) -> None:
    view = mlp(np.random.default_rng(seed), members=members)
    view = replace(view, stats=(replace(view.stats[0], gram=np.eye(8 * members)),))
    reducer = reducer_for(view, kept, "fold" if fold else "prune", seed)
    plain, grail = Plain()(view, reducer), Grail(alpha=0.0)(view, reducer)
    for slot in range(3):
        np.testing.assert_allclose(weights_of(grail, view, slot), weights_of(plain, view, slot), atol=1e-12)


@QUICK
@given(seed=SEEDS, kept=st.integers(1, 6))
def test_planted_redundancy_is_recovered(seed: int, kept: int) -> None:
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((kept, 8))
    chosen = np.sort(rng.permutation(8)[:kept])
    mix[:, chosen] = np.linalg.qr(rng.standard_normal((kept, kept))).Q  # kept channels span all, well conditioned
    rows = np.linalg.qr(rng.standard_normal((30, kept))).Q @ mix
    view = view_of([("consumer", rng.standard_normal((8, 1, 3)))], [rows])
    change = Grail(alpha=0.0)(view, Reducer(kept=chosen))
    assert change.error.compensated is not None
    assert change.error.compensated < 1e-12
    small = Grail(alpha=1e-8)(view, Reducer(kept=chosen)).error.compensated
    assert small is not None
    assert small < 1e-8


@QUICK
@given(seed=SEEDS, name=st.sampled_from([n for n in SELECTORS if n != "random"]), members=st.integers(1, 3))
def test_selectors_follow_a_permutation_of_units(seed: int, name: str, members: int) -> None:
    rng = np.random.default_rng(seed)
    view = mlp(rng, members=members)
    order = rng.permutation(8)
    features = np.arange(8 * members).reshape(8, members)[order].ravel()
    stats = view.stats[0]
    stats = replace(stats, gram=stats.gram[np.ix_(features, features)], total=stats.total[features])
    slopes = None if view.gradient is None else view.gradient[order]
    moved = replace(view, weights=tuple(w[order] for w in view.weights), stats=(stats,), gradient=slopes)
    here, there = (SELECTORS[name](v, rng) for v in (view, moved))
    np.testing.assert_allclose(there, here[order], rtol=1e-9)


@QUICK
@given(
    seed=SEEDS,
    name=st.sampled_from([n for n in SELECTORS if n != "random"]),
    unit=st.sampled_from([1e-4, 30.0]),
    size=st.sampled_from([1e-3, 20.0]),
)
def test_selectors_rank_alike_in_any_units(seed: int, name: str, unit: float, size: float) -> None:
    rng = np.random.default_rng(seed)
    view = mlp(rng, members=2)
    stats = replace(view.stats[0], gram=unit**2 * view.stats[0].gram, total=unit * view.stats[0].total)
    slopes = None if view.gradient is None else unit * size * view.gradient
    scaled = replace(view, weights=tuple(size * w for w in view.weights), stats=(stats,), gradient=slopes)
    here, there = (np.argsort(SELECTORS[name](v, rng)).tolist() for v in (view, scaled))
    assert here == there


@QUICK
@given(seed=SEEDS, copies=st.integers(1, 4), name=st.sampled_from(["obs", "slimgpt"]))
def test_redundant_units_are_the_first_to_go(seed: int, copies: int, name: str) -> None:
    rng = np.random.default_rng(seed)
    source = rng.permutation(np.concatenate([np.arange(5), rng.integers(0, 5, copies)]))
    rows = np.linalg.qr(rng.standard_normal((40, 5))).Q[:, source]
    view = view_of([("consumer", rng.uniform(1.0, 2.0, (len(source), 1, 3)))], [rows])
    kept = REDUCERS["prune"](view, 5, SELECTORS[name](view, rng), rng).kept
    assert sorted(source[kept].tolist()) == [0, 1, 2, 3, 4]
    error = Grail(alpha=0.0)(view, Reducer(kept=kept)).error.compensated
    assert error == pytest.approx(0.0, abs=1e-12)


@QUICK
@given(seed=SEEDS, fold=st.booleans())
def test_compensation_follows_a_permutation_of_units(seed: int, fold: bool) -> None:
    rng = np.random.default_rng(seed)
    view = mlp(rng)
    order = rng.permutation(8)
    gram = view.stats[0].gram[np.ix_(order, order)]
    moved = replace(view, weights=tuple(w[order] for w in view.weights), stats=(replace(view.stats[0], gram=gram),))
    here = reducer_for(view, 4, "fold" if fold else "prune", seed)
    place = np.argsort(order)
    if here.cluster is None:
        there = Reducer(kept=np.sort(place[here.kept]))
    else:
        _, first, labels = np.unique(here.cluster[order], return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first))
        there = Reducer(kept=np.sort(first), cluster=rank[labels])
    first_error, second_error = (Grail()(v, r).error.compensated for v, r in ((view, here), (moved, there)))
    assert first_error == pytest.approx(second_error, rel=1e-6, abs=1e-12)


@QUICK
@given(seed=SEEDS, n=st.integers(1, 20), distinct=st.integers(1, 20), data=st.data())
def test_kmeans_uses_every_label(seed: int, n: int, distinct: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((distinct, 2))[rng.integers(0, distinct, n)]
    clusters = data.draw(st.integers(1, n))
    labels = kmeans(rows, clusters)
    assert sorted(set(labels.tolist())) == list(range(clusters))
    first = [int(np.argmax(labels == c)) for c in range(clusters)]
    assert first == sorted(first)
    if clusters >= len(np.unique(rows, axis=0)):  # enough clusters for every distinct row: nothing is averaged
        for label in range(clusters):
            assert np.ptp(rows[labels == label], axis=0).max() < 1e-12


@QUICK
@given(seed=SEEDS, rank=st.integers(0, 6), lam=st.sampled_from([0.0, 1e-12, 1e-3, 1.0]))
def test_solve_always_ends_in_finite_numbers(seed: int, rank: int, lam: float) -> None:
    rng = np.random.default_rng(seed)
    factor = rng.standard_normal((6, rank)) * 10.0 ** rng.integers(-6, 6, (6, 1))
    gram, rhs = factor @ factor.T, rng.standard_normal((6, 2))
    solution, used = ridge_solve(gram, rhs, lam)
    assert np.isfinite(solution).all()
    assert used >= lam
