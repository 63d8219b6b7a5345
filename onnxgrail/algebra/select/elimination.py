"""Greedy backward elimination: removes the unit whose loss, after a refit of all others, is smallest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np

from onnxgrail.algebra.select.quadratic import Quadratic, features, quadratics
from onnxgrail.algebra.solve.linear import linear
from onnxgrail.algebra.solve.ridge import GROWTHS
from onnxgrail.core import Floats, Ints, View
from onnxgrail.errors import DataError


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
        self.product = linear().squares(problem.columns)

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
            self.product, self.fresh = linear().squares(columns), len(self.alive)
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


PANEL = 128  # features whose removal is applied to the matrices at once
TIE = 1e-9  # losses that differ by less than this share count as equal, so that rounding decides nothing
ALPHA = 1e-3  # the ridge, as a share of the mean second moment

Batches = Callable[[list[Quadratic]], Iterator[int]]
"""Returns the number of units to remove at once, step by step; losses of the others are exact again after each step."""


class Removals(NamedTuple):
    """All units of a block, the least important first.

    Attributes:
        order: (u,) units as they were removed, then those that stay.
        costs: (u,) squared output error of the block's consumers, summed over calibration rows, that each removal adds
            if the weights of the remaining units are refitted with the ridge; 0 for units that stay.
        energy: the squared output itself, which is the sum of the costs if no unit stays.
    """

    order: Ints
    costs: Floats
    energy: float

    @property
    def places(self) -> Floats:
        """Return (u,) the place of each unit in the order, from 0."""
        found = np.empty(len(self.order))
        found[self.order] = np.arange(len(self.order))
        return found


def elimination(view: View, *, alpha: float = ALPHA, batches: Batches = lambda _: repeat(1)) -> Removals:
    """Eliminate units greedily, with the exact loss of every candidate at every step, until `view.kept` stay.

    Removing unit g with features g from consumers C costs tr(C_gᵀ (A⁻¹_gg)⁻¹ C_g) if all other weights are refitted, by
    C ← C − A⁻¹_·g (A⁻¹_gg)⁻¹ C_g and A⁻¹ ← A⁻¹ − A⁻¹_·g (A⁻¹_gg)⁻¹ A⁻¹_g·. Only A⁻¹ and M = C Cᵀ are stored: the loss
    reads only their diagonal blocks, which are kept up to date, while full updates wait until a panel of them becomes
    one matrix product. Losses of several probes are added. Ties go to the unit of higher index, so that the lower one
    stays. While rounding makes the matrices indefinite, the ridge is raised tenfold.

    Args:
        view: the block with its second moments.
        alpha: ridge parameter as a share of the mean second moment, α > 0.
        batches: one unit at a time, if not given.

    Raises:
        UsageError: the view carries no second moments.
        DataError: no ridge helps, because they hold NaN or infinity.

    References:
        Hassibi and Stork 1993, Second order derivatives for network pruning: Optimal Brain Surgeon, NeurIPS; in
        groups, Kurtic et al. 2023, ZipLM, NeurIPS, arXiv:2302.04089.
    """
    for growth in range(GROWTHS + 1):
        try:
            problems = quadratics(view, alpha * 10.0**growth)
            return _removed(view.block.units, view.kept or 0, problems, batches(problems))
        except np.linalg.LinAlgError:
            continue
    raise DataError(f"second moments of block {view.block.name!r} have no inverse", hint="Check the calibration data.")


def _removed(units: int, kept: int, problems: list[Quadratic], batches: Iterator[int]) -> Removals:
    """Remove all units but `kept` in batches, the cheapest first."""
    if not problems:  # all activations are zero: all units are equally unimportant
        return Removals(np.arange(units)[::-1], np.zeros(units), 0.0)
    parts = [Remaining(problem) for problem in problems]
    size = max(1, PANEL // max(problem.members for problem in problems))
    order: list[int] = []
    costs: list[float] = []
    alive = np.arange(units)
    batch = next(batches)
    while len(alive) > kept:
        room = min(max(size, batch), len(alive) - kept)
        for part in parts:
            part.open(room)
        gone: list[int] = []
        while len(gone) < room and len(gone) + batch <= max(size, batch):
            cost = np.sum([part.costs() for part in parts], axis=0)
            cost[gone] = np.inf
            picks = _cheapest(cost, min(batch, room - len(gone)))
            gone.extend(picks)
            costs.extend(cost[picks])
            for part in parts:
                part.remove(picks)
            batch = next(batches)
        order.extend(alive[gone])
        alive = np.delete(alive, gone)
        for part in parts if len(alive) > kept else ():
            part.close(gone)
    ends = np.append(order, alive[::-1]).astype(np.int64), np.append(costs, np.zeros(len(alive)))
    return Removals(*ends, sum(part.energy for part in parts))


def _cheapest(cost: Floats, count: int) -> Ints:
    """Return the positions of the lowest costs, cheapest first; of equal costs the last position first."""
    if count == 1:
        low = cost.min()
        return np.flatnonzero(cost <= low * (1.0 + TIE))[-1:]
    backwards = np.argsort(cost[::-1], kind="stable")[:count]
    return np.asarray(len(cost) - 1 - backwards)
