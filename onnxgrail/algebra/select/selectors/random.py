"""Scores units at random, as a baseline for all other selectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.core import Floats, View


@dataclass(frozen=True, slots=True)
class Random:
    """score_u uniform in [0, 1), shape (u,): keeps a random subset, the same one for the same generator state."""

    needs_data: ClassVar[bool] = False
    consumers_only: ClassVar[bool] = True

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Score the units (u,)."""
        return rng.random(view.block.units)
