"""Scores units by the sum of absolute producer weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.core import Floats, View


@dataclass(frozen=True, slots=True)
class L1:
    """score_u = Σ over producers, members and the rest of |W[u, m, r]|, shape (u,), in units of the weights.

    Passengers such as biases do not count. The order of the units does not change when all producers are scaled by one
    factor.

    References:
        Li et al. 2017, Pruning Filters for Efficient ConvNets, ICLR, arXiv:1608.08710, section 3.1.
    """

    needs_data: ClassVar[bool] = False

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Score the units (u,); `rng` is not used."""
        scores = np.zeros(view.block.units)
        for _, weight in view.of("producer"):
            scores += np.abs(weight).sum(axis=(1, 2))
        return scores
