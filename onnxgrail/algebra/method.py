"""Implements the three steps of GRAIL for one block: score, reduce, compensate."""

from __future__ import annotations

import numpy as np

from onnxgrail.algebra.fit.compensate import Compensator
from onnxgrail.algebra.reducers.factory import ReducerFactory, checked
from onnxgrail.core import Change, Reducer, Selector, View


def reduced(view: View, kept: int, *, selector: Selector, reducer: ReducerFactory, rng: np.random.Generator) -> Reducer:
    """Return R from u to `kept` units; for all u units it is the identity, and nothing is called.

    Args:
        view: the block with its current weights and statistics.
        kept: k, from 1 to u.
        selector: scores (u,), called only if the reducer reads scores.
        reducer: maps u units to k.
        rng: the only source of randomness.

    Raises:
        UsageError: `kept` is not from 1 to u, or statistics are missing that one of the two needs.
    """
    units = checked(view, kept)
    if kept == units:
        return Reducer(kept=np.arange(units))
    scores = selector(view, rng) if reducer.needs_scores else None
    return reducer(view, kept, scores, rng)


def reduce_and_compensate(
    view: View,
    kept: int,
    *,
    selector: Selector,
    reducer: ReducerFactory,
    compensator: Compensator,
    rng: np.random.Generator,
) -> Change:
    """Narrow a block from u to `kept` units: scores by `selector`, R by `reducer`, weights by `compensator`.

    Keeping all u units changes nothing, bit for bit, and calls none of the three.

    Args:
        view: the block with its current weights and statistics.
        kept: k, from 1 to u.
        selector: scores (u,), called only if the reducer reads scores.
        reducer: maps u units to k.
        compensator: computes the new weights.
        rng: the only source of randomness.

    Raises:
        UsageError: `kept` is not from 1 to u, or statistics are missing that one of the three needs.

    References:
        Tang et al. 2026 (GRAIL), arXiv:2602.23795.
    """
    found = reduced(view, kept, selector=selector, reducer=reducer, rng=rng)
    return compensator(view, found) if kept < view.block.units else Change(block=view.block, reducer=found)
