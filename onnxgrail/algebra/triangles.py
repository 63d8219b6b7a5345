"""Lower triangles of symmetric matrices, some rows at a time; what stands above them may be anything."""

from __future__ import annotations

import numpy as np

from onnxgrail.core import Array, Floats

PANEL = 256  # rows that are looked at together


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


def panels(width: int, rows: int = PANEL) -> list[tuple[slice, slice]]:
    """Rows of a lower triangle, some at a time, and the columns up to the last of them."""
    ends = (min(first + rows, width) for first in range(0, width, rows))
    return [(slice(first, last), slice(0, last)) for first, last in zip(range(0, width, rows), ends, strict=True)]
