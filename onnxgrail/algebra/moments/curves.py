"""Error curves and standardized scores of a block, from its second moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.fit.normal import columns_of, probe_number
from onnxgrail.algebra.select.selectors.flap import metric_of
from onnxgrail.core import Change, Floats, View

SHARES = (0.0, 0.0625, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
Error = Callable[[View, int], float]
"""Returns the relative squared error of the consumers' outputs at a width."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """The decision and the error of a block at any width.

    Attributes:
        change: decides the block.
        error: see `Error`; cheaper than a decision.
    """

    change: Callable[[View, int], Change]
    error: Error


def error_curve(view: View, error: Error) -> Floats:
    """Compute the relative squared error of the consumers' outputs when k units are kept, for k = 0 ... u, (u + 1,).

    Measured on the calibration rows at a few widths, and interpolated between them; never growing with k; 1 at k = 0
    and 0 at k = u.
    """
    units = view.block.units
    widths = widths_measured(units)[1:-1]
    known = [(0, 1.0), *((k, error(view, k)) for k in widths), (units, 0.0)]
    values = np.maximum.accumulate(np.clip([e for _, e in known], 0.0, 1.0)[::-1])[::-1]
    return np.asarray(np.interp(np.arange(units + 1), [k for k, _ in known], values))


def widths_measured(units: int) -> list[int]:
    """Return the widths at which an error curve is not interpolated, including 0 and `units`."""
    return [0, *sorted({max(1, round(share * units)) for share in SHARES} - {units}), units]


def fluctuation(view: View) -> Floats:
    """Compute standardized scores (u,): z-scores over the block of var(x_j) · Σ_o W_oj², summed over consumers.

    A unit of several features has the mean of their z-scores. 0 if all features are equal.

    Raises:
        UsageError: the view carries no second moments.

    References:
        An et al. 2024 (FLAP), AAAI, arXiv:2312.11983, WIFV and standardization.
    """
    values: dict[int, Floats] = {}
    for slot, weight in view.of("consumer"):
        number = probe_number(view, slot)
        here = metric_of("wifv", columns_of(slot, weight, view.block.probes[number]), view.stats[number])
        values[len(here)] = values.get(len(here), np.zeros(len(here))) + here
    scores = np.zeros(view.block.units)
    for one in values.values():  # probes of one block may count features differently (pooled or not)
        scores += _standard(one).reshape(view.block.units, -1).mean(axis=1)
    return scores


def _standard(values: Floats) -> Floats:
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return (values - values.mean()) / spread if spread > 0 else np.zeros_like(values)
