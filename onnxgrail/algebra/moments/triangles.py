"""Lower triangles of symmetric matrices, processed in panels of rows; values above the triangle are undefined."""

from __future__ import annotations

import numpy as np

from onnxgrail.core import Array, Floats

PANEL = 256  # rows that are processed together
SQUARE = 1024  # columns whose products are computed at once, in extra memory


def mirrored(lower: Floats) -> Floats:
    """Fill the upper half of a matrix (h, h) from its lower triangle, in place."""
    for rows, _ in panels(len(lower)):
        square = lower[rows, rows]
        square[...] = np.tril(square) + np.tril(square, -1).T
        front = slice(0, rows.start)
        lower[front, rows] = lower[rows, front].T
    return lower


def add_lower(total: Array, part: Array) -> None:
    """Add the lower triangle of a matrix to that of another one in place."""
    for place in panels(len(total)):
        np.add(total[place], part[place], out=total[place])


@np.errstate(over="ignore", invalid="ignore")  # complete sums are checked later
def add_squares(lower: Array, rows: Array) -> None:
    """Add the lower triangle of XᵀX to a matrix in place, in its type; values above the triangle are undefined.

    NumPy recognizes the product of a matrix with its own transpose, and lets other threads run meanwhile.

    Args:
        lower: (h, h).
        rows: X (n, h).
    """
    for first in range(0, len(lower), SQUARE):
        some = slice(first, first + SQUARE)
        own = rows[:, some]
        lower[some, some] += own.T @ own
        if first:
            lower[some, :first] += own.T @ rows[:, :first]


def panels(width: int) -> list[tuple[slice, slice]]:
    """Return slices of the rows of a lower triangle, each with the slice of columns up to its last row."""
    ends = (min(first + PANEL, width) for first in range(0, width, PANEL))
    return [(slice(first, last), slice(0, last)) for first, last in zip(range(0, width, PANEL), ends, strict=True)]
