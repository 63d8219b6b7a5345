"""Improve a selection by exchanging units, one in and one out, while that lowers the loss."""

from __future__ import annotations

import numpy as np

from onnxgrail.algebra.elimination import ALPHA, TIE, steadied
from onnxgrail.algebra.quadratic import Quadratic, features
from onnxgrail.algebra.remaining import blocks, inverse, subtract
from onnxgrail.core import Floats, Ints, View

MOST = 100  # exchanges in one block


def exchanged(view: View, kept: Ints, *, alpha: float = ALPHA, most: int = MOST) -> Ints:
    """The selection after exchanges: the unit whose return helps most comes back, the one missed least then leaves.

    It ends when that would be the same unit, so the loss falls with every exchange.

    Args:
        view: the block with its second moments.
        kept: (k,) units to start from.
        alpha: ridge as a share of the mean second moment, α > 0.
        most: exchanges at most.

    Returns:
        (k,) ascending units.

    Raises:
        UsageError: if the view carries no second moments.

    References:
        Meng et al. 2024, OSSCAR: One-Shot Structured Pruning in Vision and Language Models with Combinatorial
        Optimization, ICML, arXiv:2403.12983 (local search over exchanges).
    """
    return steadied(view, alpha, lambda problems: _exchanged(view.block.units, problems, kept, most))


def _exchanged(units: int, problems: list[Quadratic], kept: Ints, most: int) -> Ints:
    """The selection for given problems."""
    inside = np.isin(np.arange(units), kept)
    if not problems or inside.all():
        return np.flatnonzero(inside)
    tables = [_Swept(problem, np.flatnonzero(inside)) for problem in problems]
    for _ in range(most):
        gain = np.where(inside, -np.inf, _worth(tables))
        back = int(gain.argmax())
        for table in tables:
            table.sweep(back, inwards=True)
        cost = np.where(inside, _worth(tables), np.inf)
        away = int(cost.argmin())
        if not cost[away] < gain[back] * (1.0 - TIE):
            break
        for table in tables:
            table.sweep(away, inwards=False)
        inside[back], inside[away] = True, False
    return np.flatnonzero(inside)


def _worth(tables: list[_Swept]) -> Floats:
    """What each unit changes in the loss, by coming if it is outside and by going if it is inside."""
    return np.asarray(np.sum([table.worth() for table in tables], axis=0))


class _Swept:
    """A problem swept on the kept features P, R being all others.

    `table` is -A_PP⁻¹ at (P, P), A_PP⁻¹ A_PR at (P, R) and A_RR - A_RP A_PP⁻¹ A_PR at (R, R); `values` are the refitted
    weights at P and what they leave unexplained of A C at R.
    """

    def __init__(self, problem: Quadratic, kept: Ints) -> None:
        self.members = problem.members
        inside = np.isin(np.arange(len(problem.matrix)), features(kept, self.members))
        P, R = np.flatnonzero(inside), np.flatnonzero(~inside)
        target = problem.matrix @ problem.columns
        whole = inverse(problem.matrix[np.ix_(P, P)])
        cross = whole @ problem.matrix[np.ix_(P, R)]
        self.table = problem.matrix.copy()
        self.table[np.ix_(P, P)] = -whole
        self.table[np.ix_(P, R)], self.table[np.ix_(R, P)] = cross, cross.T
        self.table[np.ix_(R, R)] -= problem.matrix[np.ix_(R, P)] @ cross
        self.values = target.copy()
        self.values[P] = whole @ target[P]
        self.values[R] -= cross.T @ target[P]

    def worth(self) -> Floats:
        """(u,) tr(V_gᵀ |T_gg|⁻¹ V_g) for each unit g."""
        groups = self.values.reshape(-1, self.members, self.values.shape[1])
        if self.members == 1:
            return np.asarray(np.einsum("gmc,gmc->g", groups, groups) / np.abs(np.diagonal(self.table)))
        ratios = np.linalg.solve(blocks(self.table, self.members), groups @ groups.transpose(0, 2, 1))
        return np.asarray(np.abs(np.trace(ratios, axis1=1, axis2=2)))

    def sweep(self, unit: int, *, inwards: bool) -> None:
        """Move a unit into P or out of it."""
        own = slice(unit * self.members, (unit + 1) * self.members)
        pivot = np.linalg.inv(self.table[own, own])
        row, value = self.table[own].copy(), self.values[own].copy()
        share, part = pivot @ row, pivot @ value
        self.table, self.values = subtract(self.table, row, share), subtract(self.values, row, part)
        sign = 1.0 if inwards else -1.0
        self.table[own], self.table[:, own], self.values[own] = sign * share, sign * share.T, sign * part
        self.table[own, own] = -pivot
