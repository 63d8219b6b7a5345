"""Products that are added to what is there, in place."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from onnxgrail.algebra import blas
from onnxgrail.core import Array

kinds = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def some(*shape: int, dtype: Any, order: Any = "C") -> Array:
    return np.array(np.random.default_rng(0).standard_normal(shape), dtype=dtype, order=order)


@kinds
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (1, 3), (4, 0)])
def test_squares(dtype: Any, order: str, shape: tuple[int, int]) -> None:
    """Upper triangles; what lies below is left alone."""
    a = some(*shape, dtype=dtype, order=order)
    for transposed, full in ((False, a @ a.T), (True, a.T @ a)):
        start = some(len(full), len(full), dtype=dtype, order="F")
        found = start.copy(order="F")
        blas.syrk(a, found, transposed=transposed)
        np.testing.assert_allclose(found, start + np.triu(full), rtol=1e-5, atol=1e-6)
        assert np.array_equal(np.tril(found, -1), np.tril(start, -1))


@kinds
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(9, 4, 6), (2, 1, 5), (3, 5, 1), (0, 2, 3)])
def test_products(dtype: Any, order: str, shape: tuple[int, int, int]) -> None:
    k, m, n = shape
    a, b, start = some(k, m, dtype=dtype, order=order), some(k, n, dtype=dtype), some(m, n, dtype=dtype)
    found = start.copy()
    blas.gemm(a, b, found)
    np.testing.assert_allclose(found, start + a.T @ b, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_added_to_is_refused() -> None:
    """Another shape, type or order would be written past."""
    a = some(3, 4, dtype=np.float32)
    for wrong in (np.zeros((4, 4), np.float32, "F"), np.zeros((3, 3), np.float64, "F")):
        with pytest.raises(ValueError, match="cannot add"):
            blas.syrk(a, wrong, transposed=False)
    for wrong in (np.zeros((4, 5), np.float32, "F"), np.zeros((4, 4), np.float32)):
        with pytest.raises(ValueError, match="cannot add"):
            blas.gemm(a, some(3, 5, dtype=np.float32), wrong)


@pytest.mark.parametrize("size", [1, 5, 40])
def test_factors(size: int) -> None:
    """Of a part of a larger matrix, the rest of which is left alone."""
    half = some(size, size + 3, dtype=np.float64)
    gram, whole = half @ half.T, some(size + 4, size + 2, dtype=np.float64, order="F")
    kept, inner = whole.copy(), whole[3:-1, 1:-1]
    inner[...] = gram
    blas.factorise(inner)
    lower = np.tril(inner)
    np.testing.assert_allclose(lower @ lower.T, gram, rtol=1e-12, atol=1e-12)
    inner[...] = kept[3:-1, 1:-1]
    np.testing.assert_array_equal(whole, kept)


def test_quotients_and_differences_of_parts() -> None:
    """B L⁻ᵀ and C - A Bᵀ, both in place, between rows and columns that stay as they are."""
    whole = some(12, 10, dtype=np.float64, order="F")
    whole[np.arange(4), np.arange(4)] += 5.0
    kept = whole.copy()
    blas.divide(whole[5:9, :4], whole[:4, :4])
    wanted = np.linalg.solve(np.tril(kept[:4, :4]), kept[5:9, :4].T).T
    np.testing.assert_allclose(whole[5:9, :4], wanted, rtol=1e-12)
    whole[5:9, :4] = kept[5:9, :4]
    np.testing.assert_array_equal(whole, kept)
    blas.deduct(whole[5:9, :4], whole[9:, :4], whole[1:5, 6:9])
    np.testing.assert_allclose(whole[1:5, 6:9], kept[1:5, 6:9] - kept[5:9, :4] @ kept[9:, :4].T, rtol=1e-12)
    whole[1:5, 6:9] = kept[1:5, 6:9]
    np.testing.assert_array_equal(whole, kept)


@pytest.mark.parametrize("wrong", [np.eye(3, dtype=np.float32), np.eye(6)[::2, ::2], np.ones((4, 4))[:3, :3]])
def test_what_is_not_in_columns_of_doubles_is_refused(wrong: Array) -> None:
    with pytest.raises(ValueError, match="cannot work on"):
        blas.factorise(wrong)


def test_other_threads_go_on_meanwhile() -> None:
    """A thread that only counts gets its turns within a product of about a second."""
    a, c = some(2500, 3000, dtype=np.float64, order="F"), np.zeros((2500, 2500), order="F")
    turns: list[float] = []
    ended = threading.Event()

    def count() -> None:
        while not ended.is_set():
            turns.append(time.perf_counter())
            time.sleep(0.001)

    other = threading.Thread(target=count)
    other.start()
    begun = time.perf_counter()
    blas.syrk(a, c, transposed=False)
    over = time.perf_counter()
    ended.set()
    other.join()
    assert sum(begun < turn < over for turn in turns) > 5
