"""Scores units by the Euclidean norm of producer weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.core import Floats, View


@dataclass(frozen=True, slots=True)
class L2:
    """score_u = sqrt(Σ over producers, members and the rest of W[u, m, r]²), shape (u,), in units of the weights.

    Passengers such as biases do not count. Producers that compute one unit together (gate and up of a gated MLP; query,
    key and value of a head) add their squares.

    References:
        Fang et al. 2023, DepGraph, CVPR, arXiv:2301.12900 (importance of a group).
    """

    needs_data: ClassVar[bool] = False

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Score the units (u,); `rng` is not used."""
        squares = np.zeros(view.block.units)
        for _, weight in view.of("producer"):
            squares += np.square(weight).sum(axis=(1, 2))
        return np.asarray(np.sqrt(squares), np.float64)
