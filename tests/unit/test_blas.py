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
