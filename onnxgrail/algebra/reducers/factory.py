"""What every reducer promises, and what they share."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np

from onnxgrail.core import Block, Floats, Reducer, View
from onnxgrail.errors import UsageError


class ReducerFactory(Protocol):
    """Decides the `Reducer` of a block.

    `needs_scores` says whether it reads a selector's scores, `needs_data` whether it reads `view.stats`.
    """

    needs_scores: ClassVar[bool]
    needs_data: ClassVar[bool]

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


def checked(view: View, kept: int) -> int:
    """The block's units, if `kept` of them can stay.

    Raises:
        UsageError: if they cannot.
    """
    units = view.block.units
    if not 1 <= kept <= units:
        raise UsageError(f"block {view.block.name!r} has {units} units, of which {kept} cannot be kept")
    return units
