"""Scores units by greedy elimination in shrinking batches (SlimGPT)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

import numpy as np

from onnxgrail.algebra.select.elimination import elimination
from onnxgrail.algebra.select.quadratic import Quadratic
from onnxgrail.core import Floats, View


@dataclass(frozen=True, slots=True)
class SlimGpt:
    """score_u = position of the unit in the order of removal, shape (u,), from 0 for the first to u - 1.

    Losses are those of `obs`, but units of one feature go in batches: an eighth of the block, at most `largest`, then
    half of the batch before, down to `smallest`. Units of several features (heads) go one at a time. This is the
    selection only: the compensation computes the remaining weights, and the allocation the widths.

    Attributes:
        damping: ridge parameter as a share of the mean second moment.
        largest, smallest: limits of a batch.

    References:
        Ling et al. 2024, SlimGPT: Layer-wise Structured Pruning for Large Language Models, NeurIPS, arXiv:2412.18110.
    """

    damping: float = 0.01
    largest: int = 1024
    smallest: int = 8
    needs_data: ClassVar[bool] = True
    consumers_only: ClassVar[bool] = True

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Score the units (u,); `rng` is not used.

        Raises:
            UsageError: the view carries no second moments.
        """
        return elimination(view, alpha=self.damping, batches=self._batches).places

    def _batches(self, problems: list[Quadratic]) -> Iterator[int]:
        """Yield the number of units that go at each step."""
        if max((problem.members for problem in problems), default=1) > 1:
            yield from repeat(1)
        units = max((len(problem.matrix) for problem in problems), default=0)
        batch = min(max(units // 8, 1), self.largest)
        while True:
            yield batch
            batch = max(batch // 2, min(self.smallest, batch))
