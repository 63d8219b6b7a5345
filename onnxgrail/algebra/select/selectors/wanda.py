"""Scores units by consumer weights times activation size (Wanda)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.algebra.fit.normal import columns_of, probe_number
from onnxgrail.core import Floats, View

ROWS = 256  # of which absolute values are taken at once: a copy of all weights would cost more than their sums


@dataclass(frozen=True, slots=True)
class Wanda:
    """score_u = Σ over consumers and members of rms(x[u, m]) · Σ_r |W[u, m, r]|, shape (u,), in units of the outputs.

    rms(x) = sqrt(diag(G) / n) is uncentered, over the calibration rows of the consumer's probe; a pooled probe has one
    value per unit.

    References:
        Sun et al. 2024, A Simple and Effective Pruning Approach for Large Language Models, ICLR, arXiv:2306.11695,
        eq. 1, summed over a unit as Wanda-sp in An et al. 2024 (FLAP), AAAI, arXiv:2312.11983.
    """

    needs_data: ClassVar[bool] = True
    consumers_only: ClassVar[bool] = True
    needs_gram: ClassVar[bool] = False

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Score the units (u,); `rng` is not used.

        Raises:
            UsageError: the view carries no second moments.
        """
        scores = np.zeros(view.block.units)
        for slot, weight in view.of("consumer"):
            place = probe_number(view, slot)
            stats = view.stats[place]
            # Rounding may leave the diagonal of a dead channel below zero.
            rms = np.sqrt(np.maximum(stats.squares, 0.0) / max(stats.count, 1))
            columns = columns_of(slot, weight, view.block.probes[place])
            sizes = [np.abs(columns[first : first + ROWS]).sum(axis=1) for first in range(0, len(columns), ROWS)]
            scores += (np.concatenate(sizes) * rms).reshape(view.block.units, -1).sum(axis=1)
        return scores
