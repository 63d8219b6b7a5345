"""Losses of single blocks and costs for tests of paths and of searches along them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from hypothesis import strategies as st

from onnxgrail.search.harms import Harm
from onnxgrail.search.within import PATIENCE

NORMAL = PATIENCE["normal"]


def never() -> bool:
    return False


def harm(name: str, units: int, *points: tuple[int, float], kind: str = "values") -> Harm:
    losses = tuple(loss for _, loss in points)
    return Harm(name, units, kind, tuple(k for k, _ in points), losses, losses)


def product(widths: Mapping[str, int]) -> float:
    """Consecutive layers: a weight costs the product of its widths."""
    sizes = [4, *widths.values(), 3]
    return float(sum(a * b for a, b in itertools.pairwise(sizes)))


harms = st.lists(st.lists(st.floats(0, 0.2), min_size=1, max_size=4).map(sorted), min_size=1, max_size=4).map(
    lambda rows: [
        harm(f"b{n}", 16, *((16 - 3 * (k + 1), loss) for k, loss in enumerate(row))) for n, row in enumerate(rows)
    ]
)
