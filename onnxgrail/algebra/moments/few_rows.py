"""Factorizes wide Gram matrices of few rows, to compute with the rows instead.

A Gram matrix (k, k) of r rows has rank r. If r is much smaller than k, products and ridge solutions with the rows cost
r / k of those with the matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from onnxgrail.core import Floats

SIDE = 1024  # smaller matrices are not factorized
SHARE = 4  # columns of the matrix per row that are needed at least
KEPT = 2  # the same where the rows themselves can be kept, and the matrix need not be summed first
ENOUGH = 1e-6  # residual of the scaled diagonal at which only noise is left
BLOCK = 32  # pivots that are chosen together, so that most of the work is matrix products
WORTH = 0.01  # share of the largest residual that a pivot of the block needs
NOISE = 1e-4  # largest accepted residual after all rows: sums in float32 leave up to about 1e-5


def are_few(count: float, size: int, share: int = SHARE) -> bool:
    """Return True if `count` rows are few for a matrix of side `size`, which has `share` columns per row."""
    return size >= SIDE and count * share <= size


def rows_of(gram: Floats, count: int) -> Floats | None:
    """Compute rows X (r, k), r at most `count`, with XᵀX = G up to rounding: a pivoted Cholesky factorization.

    Args:
        gram: the full G (k, k), symmetric and positive semidefinite.
        count: number of rows that G is the sum of.

    Returns:
        X; None if the matrix is small, the rows are many, or G has a larger rank.

    References:
        Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, section 10.3.
    """
    size = len(gram)
    if not are_few(count, size):
        return None
    scale = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
    inverse = np.divide(1.0, scale, out=np.zeros(size), where=scale > 0.0)
    left = (scale > 0.0).astype(np.float64)  # residual diagonal, every feature scaled to 1
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
    """Return an orthonormal basis (k, r) of few rows, from sums over parts of them; None if the rows are many."""
    if not are_few(count, len(grams[0])):
        return None
    rows = rows_of(functools.reduce(np.add, grams), count)
    return None if rows is None else directions(rows)


def directions(rows: Floats) -> Floats:
    """Return an orthonormal basis (k, r) of the span of rows X (r, k)."""
    return np.asarray(np.linalg.qr(rows.T)[0])
