"""Keeps the units with the highest scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.algebra.reducers.factory import checked
from onnxgrail.core import Floats, Reducer, View
from onnxgrail.errors import UsageError


@dataclass(frozen=True, slots=True)
class Prune:
    """R selects: the `kept` units of the highest score, in ascending order, ties to the lower index.

    A score of NaN counts as the lowest.
    """

    needs_scores: ClassVar[bool] = True
    needs_data: ClassVar[bool] = False
    consumers_only: ClassVar[bool] = True

    def __call__(self, view: View, kept: int, scores: Floats | None, rng: np.random.Generator) -> Reducer:
        """Select the units; `rng` is not used.

        Raises:
            UsageError: scores are missing or do not have shape (u,), or `kept` is not from 1 to u.
        """
        units = checked(view, kept)
        if scores is None or np.shape(scores) != (units,):
            got = "none" if scores is None else f"shape {np.shape(scores)}"
            raise UsageError(f"pruning block {view.block.name!r} needs one score for each of {units} units, got {got}")
        order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")
        return Reducer(kept=np.sort(order[:kept]).astype(np.int64))
