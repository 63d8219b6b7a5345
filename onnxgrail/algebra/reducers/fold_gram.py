"""Averages units with similar activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.algebra.fit.normal import columns_of, probe_number
from onnxgrail.algebra.fold.kmeans import distances_of, joined, reducer_of
from onnxgrail.algebra.reducers.factory import checked, folds
from onnxgrail.algebra.reducers.prune import Prune
from onnxgrail.algebra.select.selectors.l2 import L2
from onnxgrail.core import Floats, Reducer, View


@dataclass(frozen=True, slots=True)
class FoldGram:
    """R averages clusters of activations: d_ij² = ½ Σ (G_ii + G_jj − 2 G_ij) (‖C_i‖² + ‖C_j‖²), joined as Ward does.

    The sum is over probes and members. d_ij² / 2 is the change of the consumers' outputs, consumers taken one by one,
    when both activations become their mean. Blocks whose units cannot be averaged are pruned by the norm of their
    producers (see `folds`).
    """

    needs_scores: ClassVar[bool] = False
    needs_data: ClassVar[bool] = True

    def __call__(self, view: View, kept: int, scores: Floats | None, rng: np.random.Generator) -> Reducer:
        """Compute the clusters; `scores` and `rng` are not used.

        Raises:
            UsageError: `kept` is not from 1 to u, or the view carries no second moments.
        """
        checked(view, kept)
        if not folds(view.block):
            return Prune()(view, kept, L2()(view, rng), rng)
        return reducer_of(joined(output_distances(view), kept))


def output_distances(view: View) -> Floats:
    """Compute (u, u) squared distances of the units' activations, weighted by their consumers' weights."""
    squares = np.zeros((view.block.units, view.block.units))
    for slot, weight in view.of("consumer"):
        place = probe_number(view, slot)
        gram = view.stats[place].gram
        norms = np.square(columns_of(slot, weight, view.block.probes[place])).sum(axis=1)
        members = len(gram) // view.block.units
        for member in range(members):
            own = slice(member, None, members)
            squares += distances_of(gram[own, own]) * (0.5 * (norms[own][:, None] + norms[own]))
    return squares
