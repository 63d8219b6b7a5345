"""Second moments of few rows: a wide matrix of small rank, handled as the few rows that it stands for.

A Gram matrix (k, k) of r rows has rank r.  With r much smaller than k, its products and ridge solutions cost r / k of
what they cost with the matrix itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from scipy import linalg

from onnxgrail.core import Floats

SIDE = 1024  # below that it is not worth while
SHARE = 4  # how many times narrower than the matrix the rows must be
ENOUGH = 1e-6  # share of its diagonal that is left of every entry when nothing but noise is
BLOCK = 32  # pivots that are chosen together, so that most of the work is products of matrices
WORTH = 0.01  # share of the largest pivot that one of them must have when its turn comes
NOISE = 1e-4  # the same for all rows: sums in float32 leave up to some 1e-5


def are_few(count: int, size: int) -> bool:
    """Whether so many rows are few for a matrix of that side."""
    return size >= SIDE and count * SHARE <= size


def rows_of(gram: Floats, count: int) -> Floats | None:
    """Rows X (r, k), r at most `count`, with XᵀX = G but for rounding: a Cholesky factorisation with pivots.

    Args:
        gram: G (k, k), symmetric and positive semidefinite, all of it.
        count: of how many rows it is the sum.

    Returns:
        X; None where the matrix is small, the rows are many, or G is not of such a rank.

    References:
        Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 10.3.
    """
    size = len(gram)
    if not are_few(count, size):
        return None
    scale = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
    inverse = np.divide(1.0, scale, out=np.zeros(size), where=scale > 0.0)
    left = (scale > 0.0).astype(np.float64)  # of the diagonal, every feature scaled to 1
    rows, rank = np.empty((count, size)), 0
    while rank < count and left.max() > ENOUGH:
        some = np.argsort(-left, kind="stable")[:BLOCK]
        block = gram[some] * np.outer(inverse[some], inverse) - rows[:rank, some].T @ rows[:rank]
        for _ in range(min(len(some), count - rank)):
            best = int(left[some].argmax())
            pivot = some[best]
            if left[pivot] <= max(ENOUGH, WORTH * float(left.max())):
                break
            row = rows[rank] = block[best] / np.sqrt(left[pivot])
            block -= np.outer(row[some], row)
            left = np.maximum(left - np.square(row), 0.0)
            left[pivot] = 0.0
            rank += 1
    return rows[:rank] * scale if float(left.max()) <= NOISE else None


def span(grams: Sequence[Floats], count: int) -> Floats | None:
    """Orthonormal directions (k, r) that hold all rows, where these are few, from sums over parts of them."""
    if not are_few(count, len(grams[0])):
        return None
    rows = rows_of(functools.reduce(np.add, grams), count)
    return None if rows is None else directions(rows)


def directions(rows: Floats) -> Floats:
    """An orthonormal basis (k, r) of what rows X (r, k) span."""
    return np.asarray(linalg.qr(rows.T, mode="economic", overwrite_a=True, check_finite=False)[0])
