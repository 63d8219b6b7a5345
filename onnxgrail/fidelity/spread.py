"""Locates the error of values: the worst channel, and the lost share of the differences between samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from onnxgrail.core import Floats
from onnxgrail.fidelity.sums import flat

ELEMENTS = 2**20  # most numbers per sample for which moments are stored
LEAST = 8  # least samples for their spread
FLOOR = 1e-2  # lower bound of a channel's energy, as a share of the mean energy


@dataclass(slots=True, eq=False)
class Spread:
    """Moments over samples, per element of one sample; memory does not grow with batches.

    Attributes:
        shape: of one sample.
        count: number of samples.
        total, square, error: sums of the values, of their squares and of the squared differences.
        whole: True if all batches had this shape, and it was small enough.
    """

    shape: tuple[int, ...] = ()
    count: int = 0
    total: Floats = field(default_factory=lambda: np.zeros(0))
    square: Floats = field(default_factory=lambda: np.zeros(0))
    error: Floats = field(default_factory=lambda: np.zeros(0))
    whole: bool = True

    def add(self, a: Floats, b: Floats) -> None:
        """Add samples of the reference and of the other model."""
        shape = a.shape[1:]
        if self.count == 0:
            self.shape = shape
        if shape != self.shape or np.prod(shape, dtype=np.int64) > ELEMENTS:
            self.whole = False
        if not self.whole or not len(a):
            return
        x, far = flat(a), flat(a - b)
        if self.count == 0:
            self.total, self.square, self.error = (np.zeros(x.shape[1]) for _ in range(3))
        self.count += len(a)
        self.total += x.sum(axis=0)
        self.square += np.einsum("ij,ij->j", x, x)
        self.error += np.einsum("ij,ij->j", far, far)

    def details(self) -> Mapping[str, float]:
        """Return the worst channel with its error, and the lost share of the differences between samples."""
        if not self.whole or not self.count:
            return {}
        found: dict[str, float] = {}
        axis = self._channels()
        if axis is not None:
            error, energy = (
                np.moveaxis(v.reshape(self.shape), axis, 0).reshape(self.shape[axis], -1).sum(axis=1)
                for v in (self.error, self.square)
            )
            far = error / np.maximum(energy, FLOOR * energy.mean()) if energy.any() else np.where(error > 0, np.inf, 0)
            found = {"worst_channel": float(far.max()), "channel": int(far.argmax())}
        inside = float((self.square - self.total**2 / self.count).sum())
        if self.count >= LEAST and inside > 0:
            found["unexplained"] = float(self.error.sum()) / inside
        return found

    def _channels(self) -> int | None:
        """Return the channel axis, the first or the last: the smaller one, but not one of two equal sides.

        None if there is only one channel.
        """
        wide = [axis for axis, size in enumerate(self.shape) if size > 1]
        if not wide:
            return None
        if len(wide) == 1:
            return wide[0]
        ends = (0, len(self.shape) - 1)
        if len(self.shape) > 2 and any(self.shape[axis] == 1 for axis in ends):
            return None
        if len(self.shape) == 3 and (self.shape[1] == self.shape[0]) != (self.shape[1] == self.shape[2]):
            return 0 if self.shape[1] == self.shape[2] else 2
        return min(reversed(ends), key=lambda axis: self.shape[axis])
