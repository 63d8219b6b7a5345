"""Scores units by ridge leverage: the part of a unit that the other units cannot predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.algebra.fit.normal import probe_number
from onnxgrail.algebra.solve.ridge import ridge_solve
from onnxgrail.core import Floats, View


@dataclass(frozen=True, slots=True)
class Gram:
    """score_u = Σ over probes and members of diag(G (G + λI)⁻¹), shape (u,), with λ = α · mean(diag G).

    Each term is between 0 and 1 and has no unit: it does not depend on the scale of the activations. Consumer weights
    do not count.

    Attributes:
        alpha: ridge parameter as a share of the mean second moment, α > 0.

    References:
        Lin et al. 2025, MoDeGPT, ICLR, arXiv:2408.09632 (its rule for MLPs).
    """

    alpha: float = 1.0
    needs_data: ClassVar[bool] = True
    consumers_only: ClassVar[bool] = True

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Score the units (u,); `rng` is not used.

        Raises:
            UsageError: the view carries no second moments.
        """
        scores = np.zeros(view.block.units)
        for place in sorted({probe_number(view, slot) for slot, _ in view.of("consumer")}):
            scores += (
                leverage(view.stats[place].gram.astype(np.float64, copy=False), self.alpha)
                .reshape(view.block.units, -1)
                .sum(axis=1)
            )
        return scores


def leverage(gram: Floats, alpha: float) -> Floats:
    """Compute diag(G (G + λI)⁻¹) of shape (h,); exactly 0 for a feature that was always silent."""
    lam = alpha * float(np.diagonal(gram).mean())
    if not lam > 0.0:
        return np.zeros(len(gram))
    whole, _ = ridge_solve(gram, np.eye(len(gram)), lam)
    return np.asarray(np.einsum("ij,ij->i", gram, whole))
