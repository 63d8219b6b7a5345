"""Products that are added to triangles in place, and systems that are solved with them."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from onnxgrail.algebra.moments import triangles
from onnxgrail.algebra.moments.triangles import add_squares, length, packed, unpacked
from onnxgrail.core import Array


def some(*shape: int, dtype: Any = np.float64, order: Any = "C") -> Array:
    return np.array(np.random.default_rng(0).standard_normal(shape), dtype=dtype, order=order)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(5, 7), (9, 4), (1, 3), (2, 6), (20, 8)])
def test_squares_are_added_to_a_triangle(
    dtype: Any, order: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one panel, and in panels of which the last is short; of a matrix only the lower half is read."""
    x, half = some(*shape, dtype=dtype, order=order), some(shape[1], shape[1], dtype=dtype)
    start = np.tril(half) + np.tril(half, -1).T
    for square in (triangles.SQUARE, 3):
        monkeypatch.setattr(triangles, "SQUARE", square)
        fresh = add_squares(None, x)
        np.testing.assert_allclose(unpacked(fresh, shape[1]), x.T @ x, rtol=1e-5, atol=1e-6)
        found = add_squares(packed(half), x)
        assert found.dtype == fresh.dtype == dtype
        np.testing.assert_allclose(unpacked(found, shape[1]), start + x.T @ x, rtol=1e-5, atol=1e-6)
    assert len(found) == length(shape[1]) < shape[1] ** 2 or shape[1] <= 3


def test_the_triangle_of_nothing_is_empty() -> None:
    assert length(0) == 0
    assert unpacked(np.zeros(0), 0).shape == (0, 0)


def test_infinite_squares_are_left_to_who_looks_at_sums() -> None:
    found = add_squares(None, np.full((3, 2), 1e30, np.float32))  # a warning would be an error
    assert np.isinf(unpacked(found, 2)).all()


def test_other_threads_go_on_during_a_product() -> None:
    """A thread that only counts gets its turns within a product of about a second."""
    x = some(3000, 2500)
    turns: list[float] = []
    ended = threading.Event()

    def count() -> None:
        while not ended.wait(0.001):
            turns.append(time.perf_counter())

    other = threading.Thread(target=count)
    other.start()
    begun = time.perf_counter()
    add_squares(None, x)
    over = time.perf_counter()
    ended.set()
    other.join()
    assert sum(begun < turn < over for turn in turns) > 5
