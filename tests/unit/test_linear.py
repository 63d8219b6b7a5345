"""Products and solutions on the host: made in parts, the same ones for any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.algebra import linear
from onnxgrail.algebra.linear import Host

SIZES = [(3, 2), (300, 1), (300, 70), (520, 0), (520, 700)]


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
    assert solution.shape == rhs.shape


def test_an_error_in_a_part_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    gram, rhs = system(300, 200)

    def broken(*_: object) -> None:
        raise MemoryError("no room")

    factor = Host(threads=2).cholesky(np.array(gram, order="F"))
    monkeypatch.setattr(linear, "substitute", broken)
    with pytest.raises(MemoryError, match="no room"):
        factor.solve(rhs)
