"""Normal equations of a block's consumers in the space of few rows, where they are smaller than those of features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.solve.linear import linear
from onnxgrail.algebra.solve.ridge import ridge_solve
from onnxgrail.core import Bools, Floats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowSpace:
    """The least-squares problem of all consumers of one probe, like `Normal`, on the rows X (r, h) themselves.

    Attributes:
        rows: Z = X Rᵀ (r, h'), narrowed features.
        made: Y = X C (r, c), original outputs.
        plain: C₀ (h', c) weights without compensation.
        lost: (c,) squares of what the outputs lose: the errors of the plain weights.
        parts: slot number and columns of each consumer.
    """

    rows: Floats
    made: Floats
    plain: Floats
    lost: Floats
    parts: tuple[tuple[int, slice], ...]

    @property
    def diagonal(self) -> Floats:
        """Return (h',) second moments of the narrowed features."""
        return np.asarray(np.einsum("rh,rh->h", self.rows, self.rows, dtype=np.float64))

    @property
    def energy(self) -> Floats:
        """Return (c,) squares of the original outputs."""
        return dots(self.made, self.made)

    def solution(self, alive: Bools, lam: float) -> tuple[Floats, float, Floats]:
        """Solve the ridge problem for the features that are `alive`: C' = Zᵀ (Z Zᵀ + λI)⁻¹ Y.

        By the push-through identity this is (Zᵀ Z + λI)⁻¹ Zᵀ Y.

        Args:
            alive: (h',) mask of the features that are not silent.
            lam: λ ≥ 0, in units of Zᵀ Z.

        Returns:
            C' − C₀ (h', c), 0 for silent features; the λ that was used, see `ridge_solve`; and (c,) the squared errors.
        """
        rows = self.rows if alive.all() else self.rows[:, alive]
        dual, used = ridge_solve(linear().squares(rows), self.made, lam, dual=True)
        weights = linear().product(rows.T, dual)
        if used == lam:  # then Y − Z C' = λ (Z Zᵀ + λI)⁻¹ Y
            errors = lam**2 * dots(dual, dual)
        else:
            rest = self.made - linear().product(rows, weights)
            errors = dots(rest, rest)
        step = np.zeros(self.plain.shape, weights.dtype)
        step[alive] = weights - self.plain[alive]
        return step, used, errors


def dots(left: Floats, right: Floats) -> Floats:
    """Compute the dot products of corresponding columns, in float64."""
    return np.asarray(np.einsum("hc,hc->c", left, right, dtype=np.float64))
