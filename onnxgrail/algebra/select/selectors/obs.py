"""Scores units by the order of removal in an exact greedy elimination (Optimal Brain Surgeon)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.algebra.select.elimination import ALPHA, elimination
from onnxgrail.core import Floats, View


@dataclass(frozen=True, slots=True)
class Obs:
    """score_u = position of the unit in the order of removal, shape (u,), from 0 for the first to u - 1.

    Each step removes the unit whose loss, with all other consumer weights refitted, is smallest, so the selection takes
    the later compensation into account. Redundant units go first, however large they are.

    Attributes:
        alpha: ridge parameter as a share of the mean second moment.

    References:
        Hassibi and Stork 1993; Kurtic et al. 2023 (ZipLM), arXiv:2302.04089.
    """

    alpha: float = ALPHA
    needs_data: ClassVar[bool] = True
    consumers_only: ClassVar[bool] = True

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Score the units (u,); `rng` is not used.

        Raises:
            UsageError: the view carries no second moments.
        """
        return elimination(view, alpha=self.alpha).places
