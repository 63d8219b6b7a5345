"""Averages units with similar producer weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.algebra.fold.kmeans import kmeans, reducer_of, ward
from onnxgrail.algebra.reducers.factory import checked, folds
from onnxgrail.algebra.reducers.prune import Prune
from onnxgrail.algebra.select.selectors.l2 import L2
from onnxgrail.core import Floats, Ints, Reducer, View


@dataclass(frozen=True, slots=True)
class Fold:
    """R averages clusters of the units' producer rows: exactly `kept` clusters, numbered by first member.

    A unit's row is its weights in all producers side by side, without biases. Blocks whose units cannot be averaged are
    pruned by the norm of their producers instead (see `folds`).

    Attributes:
        cluster: labels (u,) from rows (u, f) and a number of clusters: `ward` or `kmeans`.
        standardise: True to scale every column of the rows to mean 0 and deviation 1 first.

    References:
        Wang et al. 2025, ICLR, arXiv:2502.10216, section 3.
    """

    cluster: Callable[[Floats, int], Ints] = ward
    standardise: bool = False
    needs_scores: ClassVar[bool] = False
    needs_data: ClassVar[bool] = False

    def __call__(self, view: View, kept: int, scores: Floats | None, rng: np.random.Generator) -> Reducer:
        """Compute the clusters; `scores` and `rng` are not used.

        Raises:
            UsageError: `kept` is not from 1 to u.
        """
        checked(view, kept)
        if not folds(view.block):
            return Prune()(view, kept, L2()(view, rng), rng)
        rows = producer_rows(view)
        return reducer_of(self.cluster(_standardised(rows) if self.standardise else rows, kept))


def producer_rows(view: View) -> Floats:
    """Return (u, f) weights of each unit in all producers side by side."""
    units = view.block.units
    return np.concatenate([np.zeros((units, 0)), *(w.reshape(units, -1) for _, w in view.of("producer"))], axis=1)


def _standardised(rows: Floats) -> Floats:
    """Scale columns to mean 0 and deviation 1; constant columns become 0."""
    centred = rows - rows.mean(axis=0)
    spread = np.sqrt(np.square(centred).mean(axis=0))
    return np.asarray(np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 0.0))


KMEANS = Fold(cluster=kmeans)
