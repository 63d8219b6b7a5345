"""Clusterings against textbook versions, the theorems of folding, and what folding does to weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage

from onnxgrail.algebra.fold import kmeans as module
from onnxgrail.algebra.fold.kmeans import by_first_member, joined, kmeans, reducer_of, squared_distances, ward
from onnxgrail.algebra.narrow import plain_weights
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.reducers.fold import Fold
from onnxgrail.algebra.reducers.fold_gram import output_distances
from onnxgrail.core import Floats, Ints, View
from onnxgrail.errors import UsageError
from tests.unit.algebra_builders import mlp, view_of

AVERAGING = [name for name in REDUCERS if name.startswith("fold")]


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh for every test, so that none depends on another."""
    return np.random.default_rng(20260223)


def spread(rows: Floats, labels: Ints) -> float:
    """Σ ‖row − mean of its cluster‖², by loops."""
    total = 0.0
    for label in set(labels.tolist()):
        members = rows[labels == label]
        total += sum(float(np.sum((row - members.mean(axis=0)) ** 2)) for row in members)
    return total


def same(first: Ints, second: Ints) -> bool:
    return bool(np.array_equal(first[:, None] == first, second[:, None] == second))


@pytest.mark.parametrize("clusters", [1, 2, 7, 19, 30])
def test_ward_is_that_of_scipy(clusters: int, rng: np.random.Generator) -> None:
    rows = rng.standard_normal((30, 4)) + 100.0
    want = fcluster(linkage(rows, method="ward"), clusters, criterion="maxclust")
    got = ward(rows, clusters)
    assert same(got, want)
    assert np.array_equal(got, by_first_member(got))


def test_ward_joins_what_adds_least(rng: np.random.Generator) -> None:
    rows = rng.standard_normal((10, 2))
    labels = np.arange(10)
    for clusters in range(9, 0, -1):  # every pair tried, the sum computed anew
        tried = {}
        for a, b in combinations(np.unique(labels), 2):
            tried[a, b] = spread(rows, np.where(labels == b, a, labels))
        a, b = min(tried, key=tried.__getitem__)
        labels = np.where(labels == b, a, labels)
        assert same(ward(rows, clusters), labels)


def test_ward_of_too_many_rows_is_kmeans(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rng.standard_normal((50, 3))
    assert not np.array_equal(ward(rows, 20), kmeans(rows, 20))
    monkeypatch.setattr(module, "PAIRWISE", 49)
    assert np.array_equal(ward(rows, 20), kmeans(rows, 20))


def test_ward_survives_equal_rows() -> None:
    for clusters in range(1, 9):
        assert len(set(ward(np.ones((8, 2)), clusters).tolist())) == clusters
    assert ward(np.ones((1, 2)), 1).tolist() == [0]


def test_distances_from_the_definition(rng: np.random.Generator) -> None:
    rows = rng.standard_normal((7, 3)) + 1e3
    want = np.square(rows[:, None] - rows).sum(axis=-1)
    np.testing.assert_allclose(squared_distances(rows), want, atol=1e-10)


def best(rows: Floats, clusters: int) -> float:
    """Least sum over all partitions."""
    labelled = (np.array(labels) for labels in product(range(clusters), repeat=len(rows)))
    return min(spread(rows, labels) for labels in labelled)


@pytest.mark.parametrize("kept", [1, 2])
def test_theorems_of_folding(kept: int, rng: np.random.Generator) -> None:
    """Theorem 2.1: any pruning to k loses to the fold of what it drops; 2.2: and that to optimal clusters, k + 1."""
    for _ in range(5):
        rows = rng.standard_normal((6, 3)) + rng.standard_normal(3)
        optimum = best(rows, kept + 1)
        for stays in combinations(range(6), kept):
            gone = [i for i in range(6) if i not in stays]
            labels = np.full(6, kept)
            labels[list(stays)] = np.arange(kept)
            assert optimum <= spread(rows, labels) + 1e-12
            assert spread(rows, labels) <= np.square(rows[gone]).sum() + 1e-12


@pytest.mark.parametrize("name", AVERAGING)
def test_every_fold_makes_exactly_the_asked_clusters(name: str, rng: np.random.Generator) -> None:
    view = mlp(rng, units=12)
    for kept in range(1, 13):
        got = REDUCERS[name](view, kept, None, np.random.default_rng(1))
        assert got.cluster is not None
        assert sorted(set(got.cluster.tolist())) == list(range(kept))
        assert got.kept.tolist() == [int(np.flatnonzero(got.cluster == c)[0]) for c in range(kept)]


@pytest.mark.parametrize("name", [n for n in AVERAGING if n not in ("fold-random", "fold-gram")])
def test_folds_of_weights_merge_units_that_are_equal(name: str, rng: np.random.Generator) -> None:
    source = rng.permutation(np.repeat(np.arange(5), 3))
    weights = rng.standard_normal((5, 1, 6))[source]
    got = REDUCERS[name](view_of([("producer", weights), ("consumer", weights)]), 5, None, rng).cluster
    assert got is not None
    assert same(got, source)


def test_fold_of_activations_looks_at_data_and_not_at_producers(rng: np.random.Generator) -> None:
    source = rng.permutation(np.repeat(np.arange(5), 3))
    rows = rng.standard_normal((40, 5))[:, source]
    weights: Floats = rng.standard_normal((15, 1, 6))
    view = view_of([("producer", weights), ("consumer", rng.standard_normal((15, 1, 2)))], [rows])
    got = REDUCERS["fold-gram"](view, 5, None, rng).cluster
    assert got is not None
    assert same(got, source)
    with pytest.raises(UsageError, match="no activation statistics"):
        REDUCERS["fold-gram"](replace(view, stats=()), 5, None, rng)


def test_activation_distances_from_the_definition(rng: np.random.Generator) -> None:
    rows = [rng.standard_normal((20, 6)), rng.standard_normal((15, 3))]
    weights = [rng.standard_normal((3, 2, r)) for r in (4, 5)]
    view = view_of([("consumer", w) for w in weights], rows, feeds=[0, 1], pooled=[False, True])
    for i, j in combinations(range(3), 2):
        want = 0.0
        for m in range(2):
            far = np.square(rows[0][:, 2 * i + m] - rows[0][:, 2 * j + m]).sum()
            want += far * (np.square(weights[0][i, m]).sum() + np.square(weights[0][j, m]).sum()) / 2
        want += np.square(rows[1][:, i] - rows[1][:, j]).sum() * np.square(weights[1][[i, j]]).sum() / 2
        assert output_distances(view)[i, j] == pytest.approx(want)


def test_joining_a_pair_costs_half_its_distance(rng: np.random.Generator) -> None:
    rows = rng.standard_normal((30, 4))
    view = view_of([("consumer", rng.standard_normal((4, 1, 3)))], [rows])
    distances = output_distances(view)
    for i, j in combinations(range(4), 2):
        mean = rows[:, [i, j]].mean(axis=1)
        moved = sum(np.square(np.outer(rows[:, u] - mean, view.weights[0][u, 0])).sum() for u in (i, j))
        assert distances[i, j] / 2 == pytest.approx(moved)
    pair = min(combinations(range(4), 2), key=lambda p: distances[p])
    assert len(set(joined(distances, 3)[list(pair)].tolist())) == 1


def test_random_folds_follow_the_generator(rng: np.random.Generator) -> None:
    view = mlp(rng, units=30)
    clusters = [REDUCERS["fold-random"](view, 7, None, np.random.default_rng(seed)).cluster for seed in (1, 1, 2)]
    assert np.array_equal(clusters[0], clusters[1])  # type: ignore[arg-type]
    assert not np.array_equal(clusters[0], clusters[2])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", AVERAGING)
def test_no_fold_averages_heads(name: str, rng: np.random.Generator) -> None:
    view = replace(mlp(rng, members=2), block=replace(mlp(rng, members=2).block, kind="heads"))
    assert REDUCERS[name](view, 3, None, rng).cluster is None


def test_standardised_rows_let_no_column_rule() -> None:
    small, large = np.array([0.0, 1.0, 0.0, 1.0]), np.array([1e3, 1.01e3, 1.02e3, 9e3])
    view = view_of([("producer", np.stack([small, small, small, large], axis=1)[:, None]), ("consumer", [[[1.0]]] * 4)])
    raw, even = (
        Fold(standardise=flag)(view, 2, None, np.random.default_rng(0)).cluster.tolist()  # type: ignore[union-attr]
        for flag in (False, True)
    )
    assert raw == [0, 0, 0, 1]
    assert even == [0, 1, 0, 1]


def test_merging_is_means_before_and_sums_after(rng: np.random.Generator) -> None:
    """W_p' = (UᵀU)⁻¹Uᵀ W_p and W_c' = W_c U for memberships U; the output stays when members agree."""
    view = mlp(rng, units=6)
    reducer = reducer_of(np.array([0, 1, 0, 2, 1, 0]))
    U = np.eye(3)[[0, 1, 0, 2, 1, 0]]
    merged = plain_weights(view, reducer)
    for slot in (0, 1):
        want = np.linalg.inv(U.T @ U) @ U.T @ view.weights[slot][:, 0]
        np.testing.assert_allclose(merged[slot][:, 0], want)
    np.testing.assert_allclose(merged[2][:, 0], U.T @ view.weights[2][:, 0])
    equal: View = replace(view, weights=tuple((U @ w[:3, 0])[:, None] for w in view.weights[:2]) + view.weights[2:])
    folded = plain_weights(equal, reducer)
    x = rng.standard_normal((9, 4))

    def forward(producer: Floats, bias: Floats, consumer: Floats) -> Floats:
        return np.asarray(np.maximum(x @ producer[:, 0].T + bias[:, 0, 0], 0.0) @ consumer[:, 0])

    np.testing.assert_allclose(forward(*(folded[i] for i in range(3))), forward(*equal.weights), atol=1e-12)


def test_who_reads_scores_and_data() -> None:
    assert {name for name, r in REDUCERS.items() if r.needs_scores} == {"prune"}
    assert {name for name, r in REDUCERS.items() if r.needs_data} == {"fold-gram"}
