"""Averages random units, as a baseline for all folds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.algebra.fold.kmeans import reducer_of
from onnxgrail.algebra.reducers.factory import checked, folds
from onnxgrail.algebra.reducers.prune import Prune
from onnxgrail.core import Floats, Reducer, View


@dataclass(frozen=True, slots=True)
class FoldRandom:
    """R averages random clusters: `kept` random units start one cluster each, every other unit joins a random cluster.

    Blocks whose units cannot be averaged keep random units (see `folds`).
    """

    needs_scores: ClassVar[bool] = False
    needs_data: ClassVar[bool] = False

    def __call__(self, view: View, kept: int, scores: Floats | None, rng: np.random.Generator) -> Reducer:
        """Compute the clusters; `scores` is not used.

        Raises:
            UsageError: `kept` is not from 1 to u.
        """
        units = checked(view, kept)
        if not folds(view.block):
            return Prune()(view, kept, rng.random(units), rng)
        labels = np.concatenate([np.arange(kept), rng.integers(0, kept, units - kept)])
        return reducer_of(rng.permutation(labels))
