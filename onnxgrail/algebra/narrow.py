"""Applies a reducer to arrays whose first axis is the units, and computes the weights without compensation."""

from __future__ import annotations

import numpy as np

from onnxgrail.core import Array, Floats, Reducer, View


def mean_rows(values: Array, reducer: Reducer) -> Array:
    """Compute R V for R = `reducer.matrix(u)`: select units, or average each cluster.

    Works by indexing, so that a large R is never formed.

    Args:
        values: V (u, ...), units first.
        reducer: maps u units to k.

    Returns:
        (k, ...).
    """
    if reducer.cluster is None:
        return values[reducer.kept]
    sizes = np.bincount(reducer.cluster, minlength=len(reducer.kept))
    return sum_rows(values, reducer) / sizes.reshape(-1, *(1,) * (values.ndim - 1))


def sum_rows(values: Array, reducer: Reducer) -> Array:
    """Select units, or sum each cluster.

    Summed consumer weights of a fold keep the outputs unchanged if all members of a cluster are equal.

    Args:
        values: (u, ...), units first.
        reducer: maps u units to k.

    Returns:
        (k, ...).
    """
    if reducer.cluster is None:
        return values[reducer.kept]
    order = np.argsort(reducer.cluster, kind="stable")
    starts = np.searchsorted(reducer.cluster[order], np.arange(len(reducer.kept)))
    return np.asarray(np.add.reduceat(values[order], starts, axis=0))


def plain_weights(view: View, reducer: Reducer) -> dict[int, Floats]:
    """Compute the weights without compensation: cluster means for producers and passengers, sums for consumers.

    Returns:
        Slot number to (k, m, r) weights; empty for pruning, and for a fold that joins no units, where slicing suffices.

    References:
        Wang et al. 2025, Forget the Data and Fine-Tuning! Just Fold the Network to Compress, ICLR, arXiv:2502.10216.
    """
    if reducer.cluster is None or len(reducer.kept) == view.block.units:
        return {}
    narrow = {"producer": mean_rows, "passenger": mean_rows, "consumer": sum_rows}
    slots = zip(view.block.slots, view.weights, strict=True)
    return {number: narrow[slot.role](weight, reducer) for number, (slot, weight) in enumerate(slots)}
