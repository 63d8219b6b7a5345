"""Products that are added to triangles in place, and systems that are solved with them."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from onnxgrail.algebra.moments import triangles
from onnxgrail.algebra.moments.triangles import add_squares
from onnxgrail.algebra.solve import linear
from onnxgrail.algebra.solve.linear import backward, forward
from onnxgrail.core import Array


def some(*shape: int, dtype: Any = np.float64, order: Any = "C") -> Array:
    return np.array(np.random.default_rng(0).standard_normal(shape), dtype=dtype, order=order)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(5, 7), (9, 4), (1, 3), (0, 6), (20, 8)])
def test_squares_are_added_to_a_lower_triangle(
    dtype: Any, order: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece, and in pieces of which the last is short."""
    x, start = some(*shape, dtype=dtype, order=order), some(shape[1], shape[1], dtype=dtype)
    for square in (triangles.SQUARE, 3):
        monkeypatch.setattr(triangles, "SQUARE", square)
        found = start.copy()
        add_squares(found, x)
        np.testing.assert_allclose(np.tril(found), np.tril(start + x.T @ x), rtol=1e-5, atol=1e-6)


def test_infinite_squares_are_left_to_who_looks_at_sums() -> None:
    found = np.zeros((2, 2), np.float32)
    add_squares(found, np.full((3, 2), 1e30, np.float32))  # a warning would be an error
    assert np.isinf(found[1, 0])


def test_other_threads_go_on_during_a_product() -> None:
    """A thread that only counts gets its turns within a product of about a second."""
    x, found = some(3000, 2500), np.zeros((2500, 2500))
    turns: list[float] = []
    ended = threading.Event()

    def count() -> None:
        while not ended.wait(0.001):
            turns.append(time.perf_counter())

    other = threading.Thread(target=count)
    other.start()
    begun = time.perf_counter()
    add_squares(found, x)
    over = time.perf_counter()
    ended.set()
    other.join()
    assert sum(begun < turn < over for turn in turns) > 5


@pytest.mark.parametrize("size", [1, 4, 5, 11])
@pytest.mark.parametrize("turned", [False, True])
def test_triangular_systems(size: int, turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of which the last is short; what stands above the triangle is not read."""
    monkeypatch.setattr(linear, "BLOCK", 4)
    lower = some(size, size, order="F") + 5.0 * np.eye(size)
    rhs = some(3, size).T if turned else some(size, 3)
    there, back = rhs.copy(order="K"), rhs.copy(order="K")
    forward(lower, there)
    backward(lower, back)
    np.testing.assert_allclose(np.tril(lower) @ there, rhs, atol=1e-12)
    np.testing.assert_allclose(np.tril(lower).T @ back, rhs, atol=1e-12)
