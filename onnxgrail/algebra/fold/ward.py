"""Deterministic agglomerative clustering by Ward's criterion, with exactly k clusters."""

from __future__ import annotations

import numpy as np

from onnxgrail.algebra.fold.kmeans import PAIRWISE, kmeans
from onnxgrail.algebra.fold.partitions import by_first_member
from onnxgrail.core import Floats, Ints


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
