"""Confidence intervals of values measured on a few samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from onnxgrail.core import Floats

Z = 1.959963984540054  # normal quantile for 95 %
DRAWS = 1000  # resamples
CELLS = 2**22  # most counts to sample at once


def of_count(right: float, count: float) -> tuple[float, float] | None:
    """Compute the 95 % confidence interval of a share, from the number of correct samples.

    References:
        Wilson (1927), "Probable inference, the law of succession, and statistical inference".
    """
    if count <= 0:
        return None
    share, square = right / count, Z * Z / count
    middle = (share + square / 2) / (1 + square)
    half = Z * math.sqrt(share * (1 - share) / count + square / (4 * count)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def of_samples(
    table: Floats, value: Callable[[Floats], Floats], *, seed: int = 0, draws: int = DRAWS
) -> tuple[float, float] | None:
    """Compute the 95 % confidence interval of a value of sums, by resampling the samples (bootstrap).

    Args:
        table: (n, k) sums per sample.
        value: sums (..., k) to values.
        seed: of the random resampling.
        draws: number of resamples.

    Returns:
        None if there are fewer than two samples or no finite values.
    """
    count = len(table)
    if count < 2:
        return None
    rng = np.random.default_rng(seed)
    step = max(1, CELLS // count)
    even = np.full(count, 1 / count)
    values = [
        value(rng.multinomial(count, even, size=min(step, draws - start)) @ table) for start in range(0, draws, step)
    ]
    known = np.concatenate(values)
    known = known[np.isfinite(known)]
    if not len(known):
        return None
    low, high = np.percentile(known, (2.5, 97.5)).tolist()
    return low, high
