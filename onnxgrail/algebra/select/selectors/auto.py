"""Scores the units of a block by `obs` if that is cheap, else by `wanda`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.algebra.moments.few_rows import SIDE
from onnxgrail.algebra.select.selectors.obs import Obs
from onnxgrail.algebra.select.selectors.wanda import Wanda
from onnxgrail.core import Block, Floats, View

WIDEST = 6144
"""Largest number of features h of a probe: 8·h³ floating-point operations (43 processor seconds) and five matrices of
8·h² bytes, which is the memory that a fit may take."""
ROWS = 8
"""Number of calibration rows per feature with which the elimination takes no more operations than the sums over rows
that the fits need too."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The scores of `obs` or of `wanda`, block by block.

    Attributes:
        widest: largest number of features of a probe for which `obs` scores.
        rows: least number of calibration rows per feature, for more features than `small`.
        small: number of features below which the rows do not matter: 8.6 billion operations, 0.2 seconds. Few rows do
            not make the elimination worse: with a quarter of a row per feature, MLPs lose a fifth to two thirds less
            than by `wanda`.
    """

    widest: int = WIDEST
    rows: int = ROWS
    small: int = SIDE
    needs_data: ClassVar[bool] = True
    consumers_only: ClassVar[bool] = True

    def eliminates(self, block: Block) -> bool:
        """Return True if a block is narrow enough, so that products of its channels are measured."""
        return all(probe.width <= self.widest for probe in block.probes)

    def enough(self, rows: float, features: int) -> bool:
        """Return True if the elimination of so many features is cheap, also beside so many calibration rows."""
        return features < self.small or rows >= self.rows * features

    def taken(self, view: View) -> str:
        """Return the name of the selector that scores a block."""
        full = all(stats.gram.ndim == 2 and self.enough(stats.count, len(stats.gram)) for stats in view.stats)
        return "obs" if full and self.eliminates(view.block) else "wanda"

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Score the units (u,); `rng` is not used.

        Raises:
            UsageError: the view carries no second moments.
        """
        return Obs()(view, rng) if self.taken(view) == "obs" else Wanda()(view, rng)
