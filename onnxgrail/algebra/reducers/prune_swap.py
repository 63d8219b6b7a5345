"""Keep the best units, then exchange some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.algebra.elimination import ALPHA
from onnxgrail.algebra.reducers.prune import Prune
from onnxgrail.algebra.swaps import MOST, exchanged
from onnxgrail.core import Floats, Reducer, View


@dataclass(frozen=True, slots=True)
class PruneSwap:
    """R selects as `Prune` does, then units are exchanged while that lowers the output error after a refit.

    Attributes:
        alpha: ridge of that refit, as a share of the mean second moment.
        most: exchanges in one block.
    """

    alpha: float = ALPHA
    most: int = MOST
    needs_scores: ClassVar[bool] = True
    needs_data: ClassVar[bool] = True

    def __call__(self, view: View, kept: int, scores: Floats | None, rng: np.random.Generator) -> Reducer:
        """The selection; `rng` is not used.

        Raises:
            UsageError: as for `Prune`, and if the view carries no second moments.
        """
        first = Prune()(view, kept, scores, rng).kept
        return Reducer(kept=exchanged(view, first, alpha=self.alpha, most=self.most))
