"""k-means that moves single rows, which gets past many points where Lloyd's steps stop."""

from __future__ import annotations

import numpy as np

from onnxgrail.algebra.narrow import sum_rows
from onnxgrail.algebra.partitions import by_first_member, inertia, singletons
from onnxgrail.algebra.ward import ward
from onnxgrail.core import Floats, Ints, Reducer

SLACK = 1e-12  # gains below this share of the mean squared row are rounding


def hartigan(rows: Floats, clusters: int, sweeps: int = 20) -> Ints:
    """The better of two partitions, improved from Ward's clusters and from the singleton fold.

    So it loses neither to `ward` nor to `singletons`, and hence not to pruning to one row less.

    Args:
        rows: (n, f).
        clusters: k, from 1 to n.
        sweeps: most visits of every row.

    Returns:
        (n,) labels, numbered by the first member of each cluster, each used at least once.

    References:
        Hartigan 1975, Clustering Algorithms; Saukh et al., Cut Less, Fold More, theorems 2.1 and 2.2.
    """
    centred = rows - rows.mean(axis=0)
    products = centred @ centred.T
    starts = (ward(rows, clusters), singletons(rows, clusters))
    return min((improved(products, start, sweeps) for start in starts), key=lambda labels: inertia(centred, labels))


def improved(products: Floats, labels: Ints, sweeps: int) -> Ints:
    """Labels after moving rows, in index order, wherever Σ ‖row − mean‖² falls; no cluster is emptied.

    Taking a row out of a cluster of n saves n/(n − 1) of its squared distance to the mean, adding it to one of n costs
    n/(n + 1) of that; both follow from inner products, so a visit costs no more than the number of clusters.

    Args:
        products: (n, n) inner products of the rows.
        labels: (n,) from 0 up, all used.
        sweeps: most visits of every row.
    """
    labels = labels.copy()
    sizes = np.bincount(labels).astype(np.float64)
    clusters = Reducer(kept=np.arange(len(sizes)), cluster=labels)
    sums = np.ascontiguousarray(sum_rows(products, clusters).T)  # (n, k): row i times the sum of cluster c
    squares = np.bincount(labels, weights=sums[np.arange(len(labels)), labels])  # squared norm of each cluster's sum
    slack = SLACK * float(np.diagonal(products).mean())
    for _ in range(sweeps):
        moved = False
        for row, old in enumerate(labels):
            if sizes[old] == 1.0:
                continue
            distance = products[row, row] - 2.0 * sums[row] / sizes + squares / sizes**2
            cost = sizes / (sizes + 1.0) * distance
            cost[old] = sizes[old] / (sizes[old] - 1.0) * distance[old]
            new = int(cost.argmin())
            if cost[new] < cost[old] - slack:
                squares[old] += products[row, row] - 2.0 * sums[row, old]
                squares[new] += products[row, row] + 2.0 * sums[row, new]
                sums[:, old] -= products[row]
                sums[:, new] += products[row]
                sizes[old] -= 1.0
                sizes[new] += 1.0
                labels[row] = new
                moved = True
        if not moved:
            break
    return by_first_member(labels)
