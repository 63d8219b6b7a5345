"""How u units become k: keep the best, or average those that are alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from onnxgrail.algebra.kmeans import kmeans
from onnxgrail.algebra.selectors.l2 import L2
from onnxgrail.core import Block, Floats, Reducer, View
from onnxgrail.errors import UsageError


class ReducerFactory(Protocol):
    """Decides the `Reducer` of a block; `needs_scores` says whether it reads a selector's scores."""

    needs_scores: ClassVar[bool]

    def __call__(self, view: View, kept: int, scores: Floats | None, rng: np.random.Generator) -> Reducer:
        """From u to `kept` units."""
        ...


def folds(block: Block) -> bool:
    """Whether folding really averages this block's units.

    Heads are not averaged: a softmax of a product of mean queries and keys is no mean of anything, so a fold of them
    keeps whole heads instead.  Nor are blocks in which one weight both makes and contracts the channels (a layer inside
    a residual stream): its rows and columns would have to be merged at once.
    """
    params = [slot.param for slot in block.slots]
    return block.kind != "heads" and len(set(params)) == len(params)


@dataclass(frozen=True, slots=True)
class Prune:
    """R selects: the `kept` units of the highest score, in ascending order, ties to the lower index.

    A score of NaN counts as the lowest.
    """

    needs_scores: ClassVar[bool] = True

    def __call__(self, view: View, kept: int, scores: Floats | None, rng: np.random.Generator) -> Reducer:
        """The selection; `rng` is not used.

        Raises:
            UsageError: if scores are missing or do not have shape (u,), or `kept` is not from 1 to u.
        """
        units = _checked(view, kept)
        if scores is None or np.shape(scores) != (units,):
            got = "none" if scores is None else f"shape {np.shape(scores)}"
            raise UsageError(f"pruning block {view.block.name!r} needs one score for each of {units} units, got {got}")
        order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")
        return Reducer(kept=np.sort(order[:kept]).astype(np.int64))


@dataclass(frozen=True, slots=True)
class Fold:
    """R averages: k-means clusters of the units' producer rows, exactly `kept` of them, numbered by first member.

    A unit's row is its weights in all producers side by side, as they are: no scaling, no biases.  Blocks of heads are
    pruned by the norm of their producers instead (see `folds`).

    Attributes:
        iterations: most Lloyd steps.

    References:
        Wang et al. 2025, ICLR, arXiv:2502.10216, section 3.
    """

    iterations: int = 30
    needs_scores: ClassVar[bool] = False

    def __call__(self, view: View, kept: int, scores: Floats | None, rng: np.random.Generator) -> Reducer:
        """The clusters; `scores` and `rng` are not used.

        Raises:
            UsageError: if `kept` is not from 1 to u.
        """
        units = _checked(view, kept)
        if not folds(view.block):
            return Prune()(view, kept, L2()(view, rng), rng)
        rows = np.concatenate([np.zeros((units, 0)), *(w.reshape(units, -1) for _, w in view.of("producer"))], axis=1)
        cluster = kmeans(rows, kept, self.iterations)
        return Reducer(kept=np.unique(cluster, return_index=True)[1].astype(np.int64), cluster=cluster)


def _checked(view: View, kept: int) -> int:
    """The block's units, if `kept` of them can stay."""
    units = view.block.units
    if not 1 <= kept <= units:
        raise UsageError(f"block {view.block.name!r} has {units} units, of which {kept} cannot be kept")
    return units


REDUCERS: dict[str, ReducerFactory] = {
    "prune": Prune(),
    "fold": Fold(),
}
