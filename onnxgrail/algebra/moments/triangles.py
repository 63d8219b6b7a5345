"""Lower triangles of symmetric matrices, as flat arrays of panels.

A panel has `SQUARE` rows of the matrix (the last one fewer), each up to the column of the panel's last row, so that
products are written where they stay. A triangle of one panel is the whole matrix. Values above the diagonal are
undefined.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from onnxgrail.core import Array, Floats

SQUARE = 1024  # rows of a panel
PANEL = 256  # rows that are mirrored at once


def length(width: int) -> int:
    """Return the number of values in the triangle of a matrix (width, width)."""
    return _panels(width)[-1][2] if width else 0


def packed(matrix: Array) -> Array:
    """Return the triangle of a matrix (h, h), of which only the lower half is read."""
    triangle = np.empty(length(len(matrix)), matrix.dtype)
    for rows, panel in panels(triangle, len(matrix)):
        panel[...] = matrix[rows, : rows.stop]
    return triangle


def unpacked(triangle: Array, width: int) -> Array:
    """Return the symmetric matrix (width, width) of a triangle."""
    matrix = np.empty((width, width), triangle.dtype)
    for rows, panel in panels(triangle, width):
        matrix[rows, : rows.stop] = panel
    return mirrored(matrix)


def panels(triangle: Array, width: int) -> Iterator[tuple[slice, Array]]:
    """Yield the rows of each panel, and the panel as a view (rows, columns)."""
    for first, last, end in _panels(width):
        yield slice(first, last), triangle[end - (last - first) * last : end].reshape(last - first, last)


def _panels(width: int) -> list[tuple[int, int, int]]:
    """Return the first row of each panel, the row after its last, and where it ends in the flat array."""
    found, end = [], 0
    for first in range(0, width, SQUARE):
        last = min(first + SQUARE, width)
        end += (last - first) * last
        found.append((first, last, end))
    return found


@np.errstate(over="ignore", invalid="ignore")  # complete sums are checked later
def add_squares(triangle: Array | None, rows: Array) -> Array:
    """Add XᵀX (h, h) to a triangle in place, in its type, and return it.

    NumPy recognizes the product of a matrix with its own transpose, and lets other threads run meanwhile.

    Args:
        triangle: of an (h, h) matrix; None for zero.
        rows: X (n, h).
    """
    width = rows.shape[1]
    found = np.empty(length(width), rows.dtype) if triangle is None else triangle
    for place, panel in panels(found, width):
        own = rows[:, place]
        for columns in (place, slice(0, place.start)):
            if triangle is None:
                np.matmul(own.T, rows[:, columns], out=panel[:, columns])
            else:
                panel[:, columns] += own.T @ rows[:, columns]
    return found


def mirrored(lower: Floats) -> Floats:
    """Fill the upper half of a matrix (h, h) from its lower triangle, in place."""
    for first in range(0, len(lower), PANEL):
        rows, front = slice(first, first + PANEL), slice(0, first)
        square = lower[rows, rows]
        square[...] = np.tril(square) + np.tril(square, -1).T
        lower[front, rows] = lower[rows, front].T
    return lower
