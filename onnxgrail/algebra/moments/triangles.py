"""Lower triangles of symmetric matrices, some rows at a time; what stands above them may be anything."""

from __future__ import annotations

import numpy as np

from onnxgrail.core import Array, Floats

PANEL = 256  # rows that are looked at together
SQUARE = 1024  # columns whose products are made at once: they wait in memory of their own


def mirrored(lower: Floats) -> Floats:
    """The symmetric matrix (h, h) of a lower triangle, made in its place."""
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


@np.errstate(over="ignore", invalid="ignore")  # the sums are looked at once they are complete
def add_squares(lower: Array, rows: Array) -> None:
    """Add the lower triangle of XᵀX to a matrix in place, in its type; what comes to stand above means nothing.

    NumPy takes a product of a matrix with its own transpose for what it is, and lets other threads go on meanwhile.

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
    """Return rows of a lower triangle, some at a time, and the columns up to the last of them."""
    ends = (min(first + PANEL, width) for first in range(0, width, PANEL))
    return [(slice(first, last), slice(0, last)) for first, last in zip(range(0, width, PANEL), ends, strict=True)]
