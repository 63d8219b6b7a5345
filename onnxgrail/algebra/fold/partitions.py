"""Numbers clusters, and converts them to reducers."""

from __future__ import annotations

import numpy as np

from onnxgrail.core import Ints, Reducer


def by_first_member(labels: Ints) -> Ints:
    """Return the same clusters (n,), numbered in the order in which they first appear."""
    _, first, numbers = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[numbers]


def reducer_of(labels: Ints) -> Reducer:
    """Return the reducer that averages these clusters, given per unit (u,)."""
    cluster = by_first_member(labels)
    return Reducer(kept=np.unique(cluster, return_index=True)[1].astype(np.int64), cluster=cluster)
