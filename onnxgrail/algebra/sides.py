"""The cheapest division of items into two sides, where nets that lie across cost, too: a minimum cut."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.core import Bools, Floats

FINEST = 2**28  # whole numbers that the sum of all costs becomes, since the maximum flow is of whole numbers


@dataclass(frozen=True, slots=True)
class Net:
    """An item that others read.

    Attributes:
        maker: the item; readers: the others.
        cost: paid if a reader is on the other side than the maker, once for all of them.
    """

    maker: int
    readers: tuple[int, ...]
    cost: float


def on_the_first(first: Floats, second: Floats, nets: Sequence[Net]) -> Bools:
    """Return which items are on the first side at the lowest sum of costs; on a tie, as few as possible.

    Args:
        first: (n,) cost of each item on the first side; infinite if it has to be on the second.
        second: (n,) the same on the second side.
        nets: who reads whom.

    References:
        Greig, Porteous and Seheult 1989, Exact maximum a posteriori estimation for binary images.
    """
    from scipy.sparse import csr_array  # slow to import, and only this needs it
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    count = len(first)
    source, sink = count, count + 1
    edges: dict[tuple[int, int], float] = defaultdict(float)
    for item in range(count):
        edges[source, item] += float(second[item])
        edges[item, sink] += float(first[item])
    for number, net in enumerate(nets):
        back, there = (sink + 1 + 2 * number + side for side in (0, 1))
        edges[back, net.maker] += net.cost  # cut if a reader, and so `back`, is on the first side alone
        edges[net.maker, there] += net.cost  # cut if a reader, and so `there`, is on the second side alone
        for reader in net.readers:
            edges[reader, back] = edges[there, reader] = math.inf
    finite = sum(cost for cost in edges.values() if math.isfinite(cost))
    shares = (cost / finite if finite else cost for cost in edges.values())
    whole = [FINEST * 2 if math.isinf(share) else round(share * FINEST) for share in shares]
    rows, columns = np.array(list(edges), np.int32).T  # older releases of SciPy take flows with these alone
    size = sink + 1 + 2 * len(nets)
    capacity = csr_array((np.array(whole, np.int32), (rows, columns)), shape=(size, size))
    capacity.eliminate_zeros()
    left = capacity - maximum_flow(capacity, source, sink).flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reached = np.zeros(size, bool)
    reached[breadth_first_order(left, source, return_predecessors=False)] = True
    return reached[:count]
