"""Confidence intervals of values measured on a few samples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import numpy as np

from onnxgrail.core import Floats, Ints

Z = 1.959963984540054  # normal quantile for 95 %
DRAWS = 1000  # resamples
CELLS = 2**22  # most counts to sample at once
KEPT = 2**19  # most counts that are kept for the next call, 4 MB
LEVEL = 0.05  # chance that a mean lies above its upper bound
UNSEEN = 24  # samples at which the allowance for an unseen tail is twice that of many samples
HEAVY, TINY = 2.0, 1e-6  # limits of the tail index, and of a value relative to the largest one
STEADY = 0.02  # lower bound of a resample's variance, as a share of the sample's


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
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))  # rounding leaves the share inside


def of_samples(table: Floats, value: Callable[[Floats], Floats]) -> tuple[float, float] | None:
    """Compute the 95 % confidence interval of a value of sums, by resampling the samples (bootstrap).

    Args:
        table: (n, k) sums per sample.
        value: sums (..., k) to values.

    Returns:
        None if there are fewer than two samples or no finite values.
    """
    count = len(table)
    if count < 2:
        return None
    known = np.concatenate([value(counts @ table) for counts in _resamples(count)])
    known = known[np.isfinite(known)]
    if not len(known):
        return None
    low, high = np.percentile(known, (2.5, 97.5)).tolist()
    return low, high


def upper_bound(values: Floats, *, most: float = math.inf) -> float:
    """Compute a one-sided 95 % upper bound of the mean of a skewed quantity from a few samples.

    It is the bound of the studentized bootstrap, plus an allowance for the tail that few samples do not show: one
    unseen sample beyond the largest, counted 1 + 24 / n times. The heavier the tail, the farther it lies beyond.

    Args:
        values: (n,) one per sample.
        most: largest possible value.

    Returns:
        At least the mean; infinity for fewer than two values, or if one is not finite.

    References:
        Hall (1988), "Theoretical comparison of bootstrap confidence intervals", on the studentized bootstrap.
        Hill (1975), "A simple general approach to inference about the tail of a distribution".
    """
    count = len(values)
    if count < 2 or not np.isfinite(values).all():
        return math.inf
    mean, largest = float(values.mean()), float(values.max())
    far = values - mean
    variance = float(far @ far) / count
    if variance <= (1e-12 * max(largest, 0.0)) ** 2:
        return max(mean, largest)
    ratios = []
    for counts in _resamples(count):
        shares = counts / count
        moved = shares @ far
        spread = np.maximum(shares @ far**2 - moved**2, STEADY * variance)
        ratios.append(moved / np.sqrt(spread))
    lowest = float(np.quantile(np.concatenate(ratios), LEVEL, method="lower"))
    unseen = max(largest, min(most, largest * math.exp(_tail_index(values))))
    return mean + max(0.0, -lowest * math.sqrt(variance)) + (1 + UNSEEN / count) * (unseen - mean) / count


def unseen_share(count: float) -> float:
    """Compute the 95 % upper bound of the share of something that none of `count` samples shows; 1 for none."""
    return float(1 - LEVEL ** (1 / count)) if count > 0 else 1.0


def _resamples(count: int) -> Iterator[Ints]:
    """Yield how often resamples contain each sample, (some, n) each, `DRAWS` resamples in all."""
    if count * DRAWS <= KEPT:
        yield _few_resamples(count)
        return
    rng, step = np.random.default_rng(0), max(1, CELLS // count)
    for start in range(0, DRAWS, step):
        yield rng.multinomial(count, np.full(count, 1 / count), size=min(step, DRAWS - start))


@functools.lru_cache(maxsize=4)
def _few_resamples(count: int) -> Ints:
    """Return all resamples at once; kept, since a search judges many candidates on the same number of samples."""
    found = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=DRAWS)
    found.flags.writeable = False
    return found


def _tail_index(values: Floats) -> float:
    """Return Hill's estimate of the tail index from the top quarter of the values, at most 2; 0 for a short tail."""
    top = np.sort(values)[::-1][: (len(values) + 3) // 4 + 1]
    if top[0] <= 0:
        return 0.0
    logs = np.log(np.maximum(top / top[0], TINY))
    return min(HEAVY, float((logs - logs[-1]).sum()) / (len(top) - 1))
