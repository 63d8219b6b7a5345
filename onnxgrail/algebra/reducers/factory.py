"""The protocol of reducer factories, and checks that they share."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np

from onnxgrail.core import Block, Floats, Reducer, View
from onnxgrail.errors import UsageError


class ReducerFactory(Protocol):
    """A reducer factory decides the `Reducer` of a block.

    `needs_scores` is True if it reads a selector's scores, `needs_data` if it reads `view.stats`.
    """

    needs_scores: ClassVar[bool]
    needs_data: ClassVar[bool]

    def __call__(self, view: View, kept: int, scores: Floats | None, rng: np.random.Generator) -> Reducer:
        """Reduce u units to `kept` units."""
        ...


def folds(block: Block) -> bool:
    """Return True if folding averages this block's units.

    Heads are not averaged: the softmax of a product of mean queries and keys is not the mean of anything, so a fold of
    heads keeps whole heads instead. Nor are blocks in which one weight both computes and reads the channels (a layer
    inside a residual stream): its rows and columns would have to be merged at once.
    """
    params = [slot.param for slot in block.slots]
    return block.kind != "heads" and len(set(params)) == len(params)


def checked(view: View, kept: int) -> int:
    """Return the number of units of the block, if `kept` of them can stay.

    Raises:
        UsageError: `kept` is not from 1 to u.
    """
    units = view.block.units
    if not 1 <= kept <= units:
        raise UsageError(f"block {view.block.name!r} has {units} units, of which {kept} cannot be kept")
    return units
