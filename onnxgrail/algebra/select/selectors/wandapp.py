"""Scores units by consumer weights times activation size and regional gradient (Wanda++)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from onnxgrail.algebra.select.selectors.wanda import Wanda
from onnxgrail.core import Floats, View
from onnxgrail.errors import UsageError


@dataclass(frozen=True, slots=True)
class Wandapp:
    """score_u = Σ (α g + ‖x‖) |W| over the unit's consumer weights, shape (u,).

    g is the root mean square, over samples, of the gradient of ‖f(x)‖₂ for the region f (a transformer's layer, a
    residual block) that contains the weight; ‖x‖ is the norm of the weight's input in one sample. Both are divided by
    the root of the rows per sample here, which keeps the order and makes the second term that of `wanda`.

    Attributes:
        alpha: weight of the gradient.

    References:
        Wanda++: Pruning Large Language Models via Regional Gradients, eq. 3 and 4; summed over a unit as in `wanda`.
    """

    alpha: float = 100.0
    needs_data: ClassVar[bool] = True
    consumers_only: ClassVar[bool] = True
    needs_gram: ClassVar[bool] = False

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Score the units (u,); `rng` is not used.

        Raises:
            UsageError: the view carries no second moments or no gradient.
        """
        wanda = Wanda()(view, rng)
        if view.gradient is None:
            raise UsageError(
                f"block {view.block.name!r} has no regional gradient", hint="Choose another selector, such as wanda"
            )
        return wanda + self.alpha * view.gradient
