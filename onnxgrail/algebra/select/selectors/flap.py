"""Scores units by the variance of their activation and the size of the consumer weights (FLAP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from onnxgrail.algebra.fit.normal import columns_of, probe_number
from onnxgrail.core import Floats, Stats, View

Metric = Literal["wifv", "ifv", "wifn"]


@dataclass(frozen=True, slots=True)
class Flap:
    """score_u = Σ over consumers of the mean over members of the metric, shape (u,).

    - `wifv`: var(x) · Σ_r W², squared output units: the loss if the unit is replaced by its mean;
    - `ifv`: var(x), once per probe, squared activation units;
    - `wifn`: rms(x) · mean_r |W|, output units.

    var(x) and rms(x) are over the calibration rows of the probe. A unit of several features (a head) gets their mean.
    The published code squares the metric of attention first; here the metric is the same for all blocks.

    Attributes:
        metric: one of the three.

    References:
        An et al. 2024, Fluctuation-based Adaptive Structured Pruning for Large Language Models, AAAI, arXiv:2312.11983.
    """

    metric: Metric = "wifv"
    needs_data: ClassVar[bool] = True
    consumers_only: ClassVar[bool] = True
    needs_gram: ClassVar[bool] = False

    def __call__(self, view: View, rng: np.random.Generator) -> Floats:
        """Score the units (u,); `rng` is not used.

        Raises:
            UsageError: the view carries no second moments.
        """
        return np.asarray(_features(view, self.metric).mean(axis=1))


def _features(view: View, metric: Metric) -> Floats:
    """Compute the metric of each feature, summed over consumers, (u, m); for a pooled probe (u, 1)."""
    parts = []
    seen: set[int] = set()
    for slot, weight in view.of("consumer"):
        place = probe_number(view, slot)
        if metric == "ifv" and place in seen:  # `ifv` does not depend on the consumer
            continue
        seen.add(place)
        columns = columns_of(slot, weight, view.block.probes[place])
        parts.append(metric_of(metric, columns, view.stats[place]).reshape(view.block.units, -1))
    width = max((part.shape[1] for part in parts), default=1)
    total = np.zeros((view.block.units, width))
    for part in parts:
        total += part if part.shape[1] == width else part.mean(axis=1, keepdims=True)
    return total


def metric_of(metric: Metric, columns: Floats, stats: Stats) -> Floats:
    """Compute the metric of each feature of one probe for one consumer C (h, c)."""
    rows = max(stats.count, 1)
    square = np.maximum(stats.squares, 0.0) / rows
    if metric == "wifn":
        return np.asarray(np.sqrt(square) * np.abs(columns).mean(axis=1))
    # Rounding may leave the variance of a constant channel below zero.
    variance = np.maximum(square - np.square(stats.total / rows), 0.0)
    return np.asarray(variance if metric == "ifv" else variance * np.square(columns).sum(axis=1))
