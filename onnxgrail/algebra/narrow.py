"""Narrow an array whose first axis is the units: the two ways every reducer acts, and the weights that follow."""

from __future__ import annotations

import numpy as np

from onnxgrail.core import Array, Floats, Reducer, View


def mean_rows(values: Array, reducer: Reducer) -> Array:
    """R V for R = `reducer.matrix(u)`: select units, or average each cluster.

    Args:
        values: V (u, ...), units first.
        reducer: how u units become k.

    Returns:
        (k, ...).  Works by indexing, so that a large R is never formed.
    """
    if reducer.cluster is None:
        return values[reducer.kept]
    sizes = np.bincount(reducer.cluster, minlength=len(reducer.kept))
    return sum_rows(values, reducer) / sizes.reshape(-1, *(1,) * (values.ndim - 1))


def sum_rows(values: Array, reducer: Reducer) -> Array:
    """Select units, or sum each cluster: how consumers of a fold keep their output when the members agree.

    Args:
        values: (u, ...), units first.
        reducer: how u units become k.

    Returns:
        (k, ...).
    """
    if reducer.cluster is None:
        return values[reducer.kept]
    order = np.argsort(reducer.cluster, kind="stable")
    starts = np.searchsorted(reducer.cluster[order], np.arange(len(reducer.kept)))
    return np.asarray(np.add.reduceat(values[order], starts, axis=0))


def plain_weights(view: View, reducer: Reducer) -> dict[int, Floats]:
    """What folding does by itself: producers and passengers become cluster means, consumers cluster sums.

    Returns:
        Slot number to (k, m, r) weights; empty for pruning, and for a fold that joins no units, where slicing is all.

    References:
        Wang et al. 2025, Forget the Data and Fine-Tuning! Just Fold the Network to Compress, ICLR, arXiv:2502.10216.
    """
    if reducer.cluster is None or len(reducer.kept) == view.block.units:
        return {}
    narrow = {"producer": mean_rows, "passenger": mean_rows, "consumer": sum_rows}
    slots = zip(view.block.slots, view.weights, strict=True)
    return {number: narrow[slot.role](weight, reducer) for number, (slot, weight) in enumerate(slots)}
