"""The state of a backward elimination: an inverse and a product from which features are removed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrail.algebra.select.quadratic import Quadratic, features
from onnxgrail.algebra.solve.linear import linear
from onnxgrail.core import Floats, Ints


class Remaining:
    """The state of one probe's problem: A⁻¹ and M = C Cᵀ over the remaining features.

    Between `open` and `close` both are outdated: `_rows` holds the pending updates as R, Q and T (features removed,
    features), with A⁻¹ − RᵀQ and M − TᵀQ − QᵀT the current values.
    """

    def __init__(self, problem: Quadratic) -> None:
        self.problem, self.members = problem, problem.members
        self.target = linear().product(problem.matrix, problem.columns)
        self.energy = float(np.einsum("hc,hc->", problem.columns, self.target))
        self.alive = np.arange(len(problem.matrix) // self.members)
        self.fresh = len(self.alive)
        self.inverse = inverse(problem.matrix)
        self.product = linear().product(problem.columns, problem.columns.T)

    def open(self, count: int) -> None:
        """Allocate buffers for the removal of `count` units."""
        self._rows = np.zeros((3, count * self.members, len(self.inverse)))
        self._used = 0
        self._blocks = [blocks(self.inverse, self.members), blocks(self.product, self.members)]

    def costs(self) -> Floats:
        """Return (u,) the loss of each unit; 0 for units removed already."""
        inverses, products = self._blocks
        if self.members == 1:
            return np.asarray(np.maximum(products, 0.0).ravel() / inverses.ravel())
        return np.asarray(np.maximum(np.trace(np.linalg.solve(inverses, products), axis1=1, axis2=2), 0.0))

    def remove(self, units: Ints) -> None:
        """Record that the units at these positions go, all at once, and update the losses."""
        own, used = features(units, self.members), self._used
        R, Q, T = self._rows[:, :used]
        row = self.inverse[own] - R[:, own].T @ Q
        weight = self.product[own] - T[:, own].T @ Q - Q[:, own].T @ T
        share = row / row[:, own] if len(own) == 1 else np.linalg.solve(row[:, own], row)
        half = weight - 0.5 * (weight[:, own] @ share)
        self._used += len(own)
        self._rows[:, used : self._used] = row, share, half
        cross = outer(half, share, self.members)
        self._blocks[0] -= outer(row, share, self.members)
        self._blocks[1] -= cross + cross.transpose(0, 2, 1)
        self._blocks[0][units], self._blocks[1][units] = np.eye(self.members), 0.0

    def close(self, gone: Sequence[int] | Ints) -> None:
        """Apply the pending removals to the matrices and drop the units."""
        stay = np.delete(np.arange(len(self.alive)), gone)
        self.alive = self.alive[stay]
        if len(self.alive) <= self.fresh // 2:  # a new inverse is cheap now and resets rounding errors
            keep = features(self.alive, self.members)
            self.inverse = inverse(self.problem.matrix[np.ix_(keep, keep)])
            columns = linear().product(self.inverse, self.target[keep])
            self.product, self.fresh = linear().product(columns, columns.T), len(self.alive)
            return
        keep = features(stay, self.members)
        R, Q, T = (np.ascontiguousarray(rows[:, keep]) for rows in self._rows)
        self.inverse = subtract(self.inverse[keep].take(keep, axis=1), R, Q)
        self.product = subtract(self.product[keep].take(keep, axis=1), np.concatenate([T, Q]), np.concatenate([Q, T]))


def inverse(matrix: Floats) -> Floats:
    """Return the full inverse of a positive definite matrix (h, h).

    Raises:
        LinAlgError: the matrix is not positive definite, or not finite.
    """
    return linear().inverse(matrix) if len(matrix) else matrix


def subtract(matrix: Floats, left: Floats, right: Floats) -> Floats:
    """Compute the matrix (h, h) − leftᵀ right for left and right (c, h), in place."""
    if not len(matrix):
        return matrix
    from scipy.linalg import blas  # slow to import, and only an elimination needs it

    return np.asarray(blas.dgemm(-1.0, right.T, left.T, beta=1.0, c=matrix.T, trans_b=1, overwrite_c=1).T)


def blocks(matrix: Floats, members: int) -> Floats:
    """Return a copy of the (u, m, m) diagonal blocks."""
    units = len(matrix) // members
    each = np.arange(units)
    return np.asarray(matrix.reshape(units, members, units, members)[each, :, each, :].copy())


def outer(left: Floats, right: Floats, members: int) -> Floats:
    """Return the (u, m, m) diagonal blocks of leftᵀ right for left and right (c, u·m)."""
    if members == 1:
        return np.asarray(np.einsum("cu,cu->u", left, right)[:, None, None])
    first, second = (rows.reshape(len(rows), -1, members).transpose(1, 0, 2) for rows in (left, right))
    return np.asarray(first.transpose(0, 2, 1) @ second)
