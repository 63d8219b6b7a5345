"""Narrows without compensation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnxgrail.algebra.fit.normal import block_error, normals
from onnxgrail.algebra.narrow import plain_weights
from onnxgrail.core import BlockError, Change, Reducer, View


@dataclass(frozen=True, slots=True)
class Plain:
    """No compensation: C' = C[kept] for pruning; for folding, cluster sums of C and means of producers and passengers.

    Slicing is left to the graph code, so pruning changes no values.

    Attributes:
        measured: True to compute the error of the consumers' outputs if there are second moments.
    """

    measured: bool = True
    needs_data: ClassVar[bool] = False
    consumers_only: ClassVar[bool] = True

    def __call__(self, view: View, reducer: Reducer) -> Change:
        """Compute the decision for `view.block`."""
        error = block_error(normals(view, reducer)) if view.stats and self.measured else BlockError()
        weights = tuple(plain_weights(view, reducer).items())
        return Change(block=view.block, reducer=reducer, weights=weights, error=error)

    def error(self, view: View, reducer: Reducer) -> BlockError:
        """Compute the errors alone, from some outputs of the consumers."""
        return block_error(normals(view, reducer, brief=True)) if view.stats else BlockError()
