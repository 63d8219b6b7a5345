"""Narrow without compensation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from onnxgrail.algebra.fit.normal import block_error, normals
from onnxgrail.algebra.narrow import plain_weights
from onnxgrail.core import BlockError, Change, Reducer, View


@dataclass(frozen=True, slots=True)
class Plain:
    """C' = C[kept] for pruning; cluster sums of C, with cluster means of producers and passengers, for folding.

    Sliced weights are left to the graph side, so pruning changes no values.

    Attributes:
        measured: where second moments are at hand the error of the consumers' outputs is told.
    """

    measured: bool = True
    needs_data: ClassVar[bool] = False

    def __call__(self, view: View, reducer: Reducer) -> Change:
        """The decision for `view.block`."""
        error = block_error(normals(view, reducer)) if view.stats and self.measured else BlockError()
        weights = tuple(plain_weights(view, reducer).items())
        return Change(block=view.block, reducer=reducer, weights=weights, error=error)
