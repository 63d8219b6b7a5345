"""Products and solutions on the host: made in parts, the same ones for any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.algebra.solve import linear
from onnxgrail.algebra.solve.linear import Host

SIZES = [(3, 2), (300, 1), (300, 70), (520, 0), (520, 700), (1101, 40)]


def system(size: int, columns: int) -> tuple[linear.Floats, linear.Floats]:
    rng = np.random.default_rng(size + columns)
    rows = rng.standard_normal((2 * size, size))
    return rows.T @ rows, rng.standard_normal((size, columns))


@pytest.mark.parametrize(("size", "columns"), SIZES)
def test_threads_change_nothing(size: int, columns: int) -> None:
    gram, rhs = system(size, columns)
    one, many = Host(), Host(threads=3)
    np.testing.assert_array_equal(many.product(gram, rhs), one.product(gram, rhs))
    found = [host.cholesky(np.array(gram, order="F")).solve(rhs) for host in (one, many)]
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.parametrize(("size", "columns"), SIZES)
@pytest.mark.parametrize("turned", [False, True])
def test_parts_make_the_whole(size: int, columns: int, turned: bool) -> None:
    gram, rhs = system(size, columns)
    given = rhs.T.copy().T if turned else rhs
    kept = given.copy()
    host = Host(threads=2)
    np.testing.assert_allclose(host.product(gram, given), gram @ rhs, rtol=1e-12, atol=1e-9)
    solution = host.cholesky(np.array(gram, order="F")).solve(given)
    np.testing.assert_allclose(gram @ solution, rhs, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(given, kept)
    for column in rhs.T[:1]:
        np.testing.assert_allclose(host.cholesky(gram.copy()).solve(column), solution[:, 0], rtol=0, atol=1e-12)
    assert solution.shape == rhs.shape


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 9), (300, 20), (700, 64)])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_squares_of_rows_are_the_whole_product(shape: tuple[int, int], kind: type) -> None:
    rows = np.random.default_rng(0).standard_normal(shape).astype(kind)
    one, many = (Host(threads=threads).squares(rows) for threads in (1, 3))
    np.testing.assert_allclose(one, rows @ rows.T, rtol=0, atol=1e-4 if kind == np.float32 else 1e-10)
    np.testing.assert_array_equal(one, one.T)
    np.testing.assert_array_equal(many, one)
    assert one.dtype == kind


@pytest.mark.parametrize("size", [0, 1, 4, 5, 11])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_blocks_make_the_whole(size: int, kind: type[np.floating], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last block is short; what stands above the diagonal is not read."""
    gram, rhs = (array.astype(kind) for array in system(size, 3))
    once = Host().cholesky(gram.copy()).solve(rhs)
    monkeypatch.setattr(linear, "WHOLE", 0)
    monkeypatch.setattr(linear, "BLOCK", 4)
    found = Host().cholesky(np.tril(gram) + np.triu(np.full_like(gram, np.inf), 1)).solve(rhs)
    assert found.dtype == once.dtype == kind
    np.testing.assert_allclose(found, once, rtol=1e-3 if kind is np.float32 else 1e-9)


@pytest.mark.parametrize("size", [0, 1, 5, 70, 500])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("whole", [0, linear.WHOLE])
def test_an_inverse_is_symmetric_and_inverts(
    size: int, kind: type[np.floating], whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "WHOLE", whole)
    gram = system(size, 0)[0].astype(kind) + size * np.eye(size, dtype=kind)
    one, many = (Host(threads=threads).inverse(gram.copy()) for threads in (1, 3))
    assert one.dtype == kind
    np.testing.assert_allclose(one @ gram, np.eye(size), rtol=0, atol=1e-3 if kind is np.float32 else 1e-11)
    np.testing.assert_array_equal(one, one.T)
    np.testing.assert_array_equal(many, one)


@pytest.mark.parametrize("place", [0, 300, 700, 1100])
def test_what_is_not_positive_is_refused(place: int) -> None:
    """In whatever part of a large matrix it shows."""
    gram = np.array(system(1101, 0)[0], order="F")
    gram[place, place] = -1.0
    with pytest.raises(np.linalg.LinAlgError, match="not positive definite"):
        Host(threads=2).cholesky(gram)


def test_rows_and_columns_are_picked() -> None:
    matrix, _ = system(300, 0)
    rows, columns = np.arange(299, 2, -1), np.array([7, 7, 0, 299])
    for threads in (1, 3):
        found = Host(threads).picked(matrix, rows, columns)
        np.testing.assert_array_equal(found, matrix[np.ix_(rows, columns)])
    assert Host().picked(matrix, rows[:0], columns).shape == (0, 4)


def test_an_error_in_a_part_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    gram, rhs = system(300, 200)

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    factor = Host(threads=2).cholesky(np.array(gram, order="F"))
    monkeypatch.setattr(linear, "substitute", broken)
    with pytest.raises(MemoryError, match="no room"):
        factor.solve(rhs)
