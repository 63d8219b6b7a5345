"""Deterministic clustering with exactly k clusters: k-means with a farthest-point start, and Ward's criterion."""

from __future__ import annotations

import numpy as np

from onnxgrail.algebra.narrow import mean_rows
from onnxgrail.core import Floats, Ints, Reducer


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


PAIRWISE = 8192  # most rows for which all distances are stored at once (8192² float64 are 0.5 GiB)
CHUNK = 2048  # rows compared with all centers at once


def kmeans(rows: Floats, clusters: int, iterations: int = 30) -> Ints:
    """Cluster rows to minimize Σ ‖row − mean of its cluster‖²; each of the `clusters` labels is used at least once.

    Starts from the row farthest from the mean of all, then always the row farthest from those chosen: on weight rows
    this is better than k-means++ and needs no seed. Ties go to the lower index.

    Args:
        rows: (n, f).
        clusters: k, from 1 to n.
        iterations: most Lloyd steps; it stops earlier if labels no longer change.

    Returns:
        (n,) labels, numbered by the first member of each cluster.

    References:
        Gonzalez 1985, Clustering to minimize the maximum intercluster distance (start); Lloyd 1982 (steps).
    """
    centred = rows - rows.mean(axis=0)  # keeps distances, and their expansion loses fewer digits
    centres = centred[_farthest_points(centred, clusters)]
    labels = _filled(centred, _nearest(centred, centres), clusters)
    for _ in range(iterations):
        centres = mean_rows(centred, Reducer(kept=np.arange(clusters), cluster=labels))
        moved = _filled(centred, _nearest(centred, centres), clusters)
        if np.array_equal(moved, labels):
            break
        labels = moved
    return by_first_member(labels)


def _farthest_points(rows: Floats, count: int) -> Ints:
    """Return the indices of `count` distinct rows, each farthest from the ones before it."""
    squares = np.einsum("nf,nf->n", rows, rows)
    # One matrix product gives all distances at once, if there is enough memory for them.
    products = rows @ rows.T if len(rows) <= PAIRWISE else None
    chosen = np.zeros(count, np.int64)
    distance = squares.copy()  # the mean is the origin
    for i in range(count):
        chosen[i] = np.argmax(distance)
        product = rows @ rows[chosen[i]] if products is None else products[chosen[i]]
        reach = squares + squares[chosen[i]] - 2.0 * product
        distance = np.maximum(reach, 0.0) if i == 0 else np.minimum(distance, np.maximum(reach, 0.0))
        distance[chosen[i]] = -1.0  # never twice, even among equal rows
    return chosen


def _nearest(rows: Floats, centres: Floats) -> Ints:
    """Return the label of the nearest center for each row."""
    squares = np.einsum("kf,kf->k", centres, centres)
    chunks = [np.argmin(squares - 2.0 * rows[i : i + CHUNK] @ centres.T, axis=1) for i in range(0, len(rows), CHUNK)]
    return np.concatenate(chunks).astype(np.int64)


def _filled(rows: Floats, labels: Ints, clusters: int) -> Ints:
    """Fill every empty cluster with the row of the largest cluster that is farthest from its mean."""
    filled = labels.copy()
    for empty in np.flatnonzero(np.bincount(filled, minlength=clusters) == 0):
        members = np.flatnonzero(filled == np.bincount(filled, minlength=clusters).argmax())
        offsets = rows[members] - rows[members].mean(axis=0)
        filled[members[np.argmax(np.einsum("nf,nf->n", offsets, offsets))]] = empty
    return filled


def ward(rows: Floats, clusters: int) -> Ints:
    """Cluster rows to minimize Σ ‖row − mean of its cluster‖²; each of the `clusters` labels is used at least once.

    Clusters are joined two by two, always the pair that adds least to the sum. Memory grows with the square of the
    number of rows, so more than `PAIRWISE` rows are clustered by `kmeans`.

    Args:
        rows: (n, f).
        clusters: k, from 1 to n.

    Returns:
        (n,) labels, numbered by the first member of each cluster.

    References:
        Ward 1963, Hierarchical grouping to optimize an objective function, JASA 58.
    """
    if len(rows) > PAIRWISE:
        return kmeans(rows, clusters)
    return joined(squared_distances(rows), clusters)


def joined(squares: Floats, clusters: int) -> Ints:
    """Compute Ward's clusters from squared distances (n, n), symmetric; see `ward`."""
    from scipy.cluster.hierarchy import linkage  # slow to import, and not needed for pruning
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial.distance import squareform

    units = len(squares)
    if clusters == units:
        return np.arange(units)
    steps = linkage(np.sqrt(squareform(squares, checks=False)), method="ward")[: units - clusters, :2].astype(np.int64)
    # Step i joins two nodes into node n + i; after n - k steps the trees are the clusters, also if heights tie.
    nodes = units + np.arange(len(steps))
    ends = np.concatenate([steps[:, 0], steps[:, 1]])
    graph = coo_array((np.ones(len(ends)), (ends, np.tile(nodes, 2))), shape=(units + len(steps),) * 2)
    return by_first_member(connected_components(graph, directed=False)[1][:units])


def squared_distances(rows: Floats) -> Floats:
    """Compute (n, n) squared Euclidean distances, by one matrix product."""
    centred = rows - rows.mean(axis=0)  # keeps distances, and their expansion loses fewer digits
    return distances_of(centred @ centred.T)


def distances_of(products: Floats) -> Floats:
    """Compute (n, n) squared distances of vectors from their inner products."""
    own = np.diagonal(products)
    squares = np.maximum(own[:, None] + own - 2.0 * products, 0.0)
    np.fill_diagonal(squares, 0.0)
    return squares
