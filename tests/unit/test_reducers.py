"""Selections and clusters."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.algebra.fold import kmeans as kmeans_module
from onnxgrail.algebra.fold.kmeans import kmeans
from onnxgrail.algebra.narrow import mean_rows, sum_rows
from onnxgrail.algebra.reducers import REDUCERS
from onnxgrail.algebra.reducers.factory import folds
from onnxgrail.algebra.reducers.fold import Fold
from onnxgrail.core import Floats, Ints, Reducer
from onnxgrail.errors import UsageError
from tests.unit.algebra_builders import matrix_of, mlp, view_of


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh for every test, so that none depends on another."""
    return np.random.default_rng(20260223)


def inertia(rows: Floats, labels: Ints) -> float:
    return float(sum(((rows[labels == c] - rows[labels == c].mean(axis=0)) ** 2).sum() for c in np.unique(labels)))


def fold(rows: Floats, kept: int) -> Reducer:
    view = view_of([("producer", rows[:, None, :]), ("consumer", np.ones((len(rows), 1, 2)))])
    return REDUCERS["fold"](view, kept, None, np.random.default_rng(0))


def test_prune_keeps_the_best_in_order(rng: np.random.Generator) -> None:
    view = mlp(rng, units=5)
    got = REDUCERS["prune"](view, 3, np.array([0.1, 5.0, 2.0, 0.2, 7.0]), rng)
    assert got.kept.tolist() == [1, 2, 4]
    assert got.cluster is None


def test_prune_breaks_ties_by_index(rng: np.random.Generator) -> None:
    view = mlp(rng, units=6)
    assert REDUCERS["prune"](view, 3, np.ones(6), rng).kept.tolist() == [0, 1, 2]
    assert REDUCERS["prune"](view, 2, np.array([0.0, 1, 1, 2, 1, 0]), rng).kept.tolist() == [1, 3]


def test_many_ties_go_to_the_lowest_indices(rng: np.random.Generator) -> None:
    view = mlp(rng, units=200)
    scores = np.ones(200)
    scores[-1] = 2.0
    assert REDUCERS["prune"](view, 150, scores, rng).kept.tolist() == [*range(149), 199]


def test_prune_survives_scores_that_are_not_finite(rng: np.random.Generator) -> None:
    scores = np.array([np.nan, 1.0, np.inf, -np.inf, np.nan, 0.0])
    assert REDUCERS["prune"](mlp(rng, units=6), 3, scores, rng).kept.tolist() == [1, 2, 5]


def test_prune_needs_scores(rng: np.random.Generator) -> None:
    with pytest.raises(UsageError, match="got none"):
        REDUCERS["prune"](mlp(rng, units=6), 3, None, rng)
    with pytest.raises(UsageError, match=r"shape \(5,\)"):
        REDUCERS["prune"](mlp(rng, units=6), 3, np.ones(5), rng)


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("kept", [0, 7])
def test_impossible_widths_are_refused(name: str, kept: int, rng: np.random.Generator) -> None:
    with pytest.raises(UsageError, match=f"has 6 units, of which {kept} cannot"):
        REDUCERS[name](mlp(rng, units=6), kept, np.ones(6), rng)


@pytest.mark.parametrize("kept", range(1, 13))
def test_fold_makes_exactly_the_asked_clusters(kept: int, rng: np.random.Generator) -> None:
    got = fold(rng.standard_normal((12, 3)), kept)
    assert got.cluster is not None
    assert sorted(set(got.cluster.tolist())) == list(range(kept))
    firsts = [int(np.flatnonzero(got.cluster == c)[0]) for c in range(kept)]
    assert got.kept.tolist() == firsts == sorted(firsts)
    np.testing.assert_allclose(matrix_of(got, 12).sum(axis=1), 1.0)


@pytest.mark.parametrize("kept", [1, 2, 5, 9, 10])
def test_fold_of_duplicates_is_exact_in_number(kept: int) -> None:
    for rows in (np.ones((10, 3)), np.zeros((10, 3)), np.repeat(np.eye(2), 5, axis=0)):
        got = fold(rows, kept)
        assert got.cluster is not None
        assert len(set(got.cluster.tolist())) == kept == len(got.kept)


def test_fold_finds_planted_clusters(rng: np.random.Generator) -> None:
    truth = rng.permutation(np.repeat(np.arange(5), 4))
    rows = 10.0 * rng.standard_normal((5, 6))[truth] + 0.01 * rng.standard_normal((20, 6))
    got = fold(rows, 5).cluster
    assert got is not None
    assert np.array_equal(got[:, None] == got[None, :], truth[:, None] == truth[None, :])


def test_fold_looks_at_all_producers_and_no_biases() -> None:
    first, second = np.array([0.0, 0, 0, 0]), np.array([0.0, 1, 0, 1])
    roles = [("producer", first), ("producer", second), ("passenger", np.array([9.0, 9, -9, -9])), ("consumer", first)]
    view = view_of([(role, w.reshape(4, 1, 1)) for role, w in roles])  # type: ignore[misc]
    got = REDUCERS["fold"](view, 2, None, np.random.default_rng(0))
    assert got.cluster is not None
    assert got.cluster.tolist() == [0, 1, 0, 1]


def test_fold_does_not_average_heads(rng: np.random.Generator) -> None:
    weights = rng.standard_normal((4, 2, 3)) * np.array([1.0, 3.0, 0.1, 2.0])[:, None, None]
    view = view_of([("producer", weights), ("consumer", weights)], kind="heads")
    got = REDUCERS["fold"](view, 2, None, rng)
    assert got.cluster is None
    assert got.kept.tolist() == [1, 3]
    assert not folds(view.block)
    assert folds(mlp(rng).block)


def test_fold_without_producers(rng: np.random.Generator) -> None:
    got = Fold()(view_of([("consumer", np.ones((4, 1, 2)))]), 2, None, rng)
    assert got.cluster is not None
    assert len(got.kept) == 2


def test_kmeans_is_no_worse_than_restarts(rng: np.random.Generator) -> None:
    rows = np.concatenate([rng.standard_normal((12, 4)) * s for s in (1.0, 1.0, 5.0)])
    ours = inertia(rows, kmeans(rows, 12))

    def lloyd(seed: int) -> float:
        centres = rows[np.random.default_rng(seed).permutation(36)[:12]]
        for _ in range(30):
            labels = ((rows[:, None] - centres) ** 2).sum(-1).argmin(1)
            centres = np.array([rows[labels == c].mean(0) if (labels == c).any() else centres[c] for c in range(12)])
        return inertia(rows, labels)

    assert ours <= np.median([lloyd(seed) for seed in range(9)])


def test_kmeans_of_many_rows_takes_the_lean_way_to_the_same_end(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rng.standard_normal((40, 5))
    whole = kmeans(rows, 9)
    monkeypatch.setattr(kmeans_module, "PAIRWISE", 8)
    monkeypatch.setattr(kmeans_module, "CHUNK", 7)
    assert np.array_equal(kmeans(rows, 9), whole)


def test_kmeans_refills_empty_clusters(rng: np.random.Generator) -> None:
    rows = np.array([[0.0], [0.1], [0.2], [5.0]])
    got = kmeans_module._filled(rows, np.array([0, 0, 0, 1]), 4)
    assert sorted(set(got.tolist())) == [0, 1, 2, 3]
    assert got[3] == 1


def test_kmeans_splits_off_the_farthest_member_of_the_largest_cluster() -> None:
    rows = np.array([[0.0], [0.1], [0.15], [4.0], [20.0], [90.0]])
    assert kmeans_module._filled(rows, np.array([0, 0, 0, 0, 1, 1]), 3).tolist() == [0, 0, 0, 2, 1, 1]


def test_kmeans_starts_from_distinct_rows() -> None:
    assert kmeans_module._farthest_points(np.zeros((6, 2)), 6).tolist() == list(range(6))


def test_kmeans_steps_lower_the_distances(rng: np.random.Generator) -> None:
    rows = rng.standard_normal((60, 3))
    assert inertia(rows, kmeans(rows, 8)) < 0.95 * inertia(rows, kmeans(rows, 8, iterations=0))


def test_kmeans_does_not_see_a_common_offset(rng: np.random.Generator) -> None:
    rows = rng.integers(-9, 9, (40, 3)).astype(np.float64)
    assert np.array_equal(kmeans(rows + 2.0**30, 9), kmeans(rows, 9))


@pytest.mark.parametrize("shape", [(9,), (9, 2), (9, 2, 3)])
def test_narrowing_equals_the_matrix(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    values = rng.standard_normal(shape)
    for reducer in (
        Reducer(kept=np.array([1, 4, 5])),
        Reducer(kept=np.array([0, 1, 4]), cluster=np.array([0, 1, 1, 0, 2, 0, 2, 2, 1])),
    ):
        matrix = matrix_of(reducer, 9)
        np.testing.assert_allclose(mean_rows(values, reducer), np.tensordot(matrix, values, 1), atol=1e-14)
        np.testing.assert_allclose(sum_rows(values, reducer), np.tensordot(matrix > 0, values, 1), atol=1e-14)
