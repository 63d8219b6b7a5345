"""Partitions of rows into clusters: how good one is, and the simplest one."""

from __future__ import annotations

import numpy as np

from onnxgrail.algebra.narrow import mean_rows
from onnxgrail.core import Floats, Ints, Reducer


def by_first_member(labels: Ints) -> Ints:
    """The same clusters (n,), numbered in the order in which they first appear."""
    _, first, numbers = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[numbers]


def reducer_of(labels: Ints) -> Reducer:
    """The reducer that averages these clusters, given per unit (u,)."""
    cluster = by_first_member(labels)
    return Reducer(kept=np.unique(cluster, return_index=True)[1].astype(np.int64), cluster=cluster)


def inertia(rows: Floats, labels: Ints) -> float:
    """Σ ‖row − mean of its cluster‖², what folding does to the rows (n, f); labels are (n,)."""
    reducer = reducer_of(labels)
    return float(np.square(rows - mean_rows(rows, reducer)[reducer.cluster]).sum())


def singletons(rows: Floats, clusters: int) -> Ints:
    """(n,) labels in which the `clusters` - 1 rows (n, f) of largest norm stand alone and all others form one cluster.

    Its inertia is at most that of pruning to `clusters` - 1 rows, since a mean is nearer to its rows than zero is.

    References:
        Saukh et al., Cut Less, Fold More, theorem 2.1.
    """
    order = np.argsort(-np.einsum("nf,nf->n", rows, rows), kind="stable")
    labels = np.full(len(rows), clusters - 1)
    labels[order[: clusters - 1]] = np.arange(clusters - 1)
    return by_first_member(labels)
