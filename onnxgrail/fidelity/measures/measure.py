"""The form of a measure: it converts a batch to sums per sample, and sums over samples to values.

A measure converts a batch to a table (n, k): one row of sums per sample. Rows can be added: `value` takes the sums over
any set of samples, which resampling needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from onnxgrail.core import Bools, Floats
from onnxgrail.fidelity.kinds.part import Part
from onnxgrail.fidelity.sums import Distances


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """A part of an output in both models on some samples.

    Attributes:
        part: its content.
        a, b: (n, ...) finite values of the reference and of the other model.
        shown: (n, S) mask of positions that are not padding, if the output has a row for each.
        distances: those of the whole output.
        read: mask of positions that have a score which is read, with the axes of `a`; None if there are no scores.
        brief: True if only losses are asked for: sums that these do not need may be NaN.
        each: number of positions of the output for each one of `a`, above 1 if `a` holds some of them.
    """

    part: Part
    a: Floats
    b: Floats
    shown: Bools | None
    distances: Distances
    read: Bools | None = None
    brief: bool = False
    each: float = 1.0

    def compared(self) -> tuple[Floats, Floats]:
        """Return the values of both models: 0 at positions that nobody reads, or about the center, in its units."""
        if self.read is not None:
            return self.a * self.read, self.b * self.read
        center, units = self.part.center, self.part.units
        if center is None and units is None:
            return self.a, self.b
        middle, each = 0.0 if center is None else center, 1.0 if units is None else units
        return (self.a - middle) / each, (self.b - middle) / each


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measure:
    """The measure of one kind of output.

    Attributes:
        name: of the reported value.
        higher: True if high values are good.
        loss: name of the continuous loss of a sample, see `loss_of`.
        scale: factor of the loss in `fidelity.loss`, where 1 % keeps about 98 % of counted things equal for all kinds.
        table: a batch to (n, k) sums per sample.
        value: (..., k) sums to values; NaN if undefined for these samples.
        losses: (n, k) sums per sample to losses; NaN if undefined for the sample.
        worst: (n, k) sums per sample to the value that is reported for the worst sample.
        details: (n, k) to further measures by name.
        trials: sums to the number of things counted as right or wrong, if the value is such a share.
        counted: True if every sample is one such thing, so that resampling adds no information.
        stepped: True if the loss is that share, too: it can be 0 on all samples of a model that is not the same.
    """

    name: str
    higher: bool
    loss: str
    table: Callable[[Batch], Floats]
    value: Callable[[Floats], Floats]
    losses: Callable[[Floats], Floats]
    worst: Callable[[Floats], Floats]
    details: Callable[[Floats], Mapping[str, float]]
    scale: float = 1.0
    trials: Callable[[Floats], float] | None = None
    counted: bool = False
    stepped: bool = False

    def loss_of(self, part: Part) -> str:
        """Return the name of the loss with the score from which on positions count."""
        return self.loss.format(least=f"{part.least:.2g}")


def nothing_more(_: Floats) -> Mapping[str, float]:
    """Return no further measures."""
    return {}


def share(top: Floats, bottom: Floats) -> Floats:
    """Compute a ratio, NaN if the divisor is not positive."""
    with np.errstate(all="ignore"):
        return np.asarray(np.where(bottom > 0, top / bottom, np.nan))
