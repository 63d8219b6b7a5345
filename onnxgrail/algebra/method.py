"""Implements the three steps of GRAIL for one block: score, reduce, compensate."""

from __future__ import annotations

from typing import TypedDict, Unpack

import numpy as np

from onnxgrail.algebra.fit.compensate import Compensator
from onnxgrail.algebra.reducers.factory import ReducerFactory, checked
from onnxgrail.core import Change, Reducer, Selector, View


class Methods(TypedDict):
    """The methods that reduce the units of a block.

    Attributes:
        selector: scores (u,), called only if the reducer reads scores.
        reducer: maps u units to k.
        rng: the only source of randomness.
    """

    selector: Selector
    reducer: ReducerFactory
    rng: np.random.Generator


def reduced(view: View, kept: int, **methods: Unpack[Methods]) -> Reducer:
    """Return R from u to `kept` units; for all u units it is the identity, and none of the methods is called.

    Raises:
        UsageError: `kept` is not from 1 to u, or statistics are missing that a method needs.
    """
    units = checked(view, kept)
    if kept == units:
        return Reducer(kept=np.arange(units))
    reducer, rng = methods["reducer"], methods["rng"]
    scores = methods["selector"](view, rng) if reducer.needs_scores else None
    return reducer(view, kept, scores, rng)


def reduce_and_compensate(view: View, kept: int, *, compensator: Compensator, **methods: Unpack[Methods]) -> Change:
    """Narrow a block from u to `kept` units: scores by `selector`, R by `reducer`, weights by `compensator`.

    Keeping all u units changes nothing, bit for bit, and calls none of the three.

    Args:
        view: the block with its current weights and statistics.
        kept: k, from 1 to u.
        compensator: computes the new weights.
        methods: see `Methods`.

    Raises:
        UsageError: `kept` is not from 1 to u, or statistics are missing that one of the three needs.

    References:
        Tang et al. 2026 (GRAIL), arXiv:2602.23795.
    """
    reducer = reduced(view, kept, **methods)
    return compensator(view, reducer) if kept < view.block.units else Change(block=view.block, reducer=reducer)
