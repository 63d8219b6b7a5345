"""Sums over rows of regressors and targets, one batch at a time."""

from __future__ import annotations

import numpy as np

from onnxgrail.algebra.moments.gram import plus
from onnxgrail.algebra.moments.regression import Moments
from onnxgrail.algebra.moments.triangles import add_squares
from onnxgrail.core import Array, Floats

TOGETHER = 8192  # rows whose products are summed in float32


class Pairs:
    """Sums of z zT and z xT, added in the order of the calls, in place.

    x are the targets t, or the inputs that t are products of. Products of a few thousand rows are summed in float32,
    and these sums in float64.
    """

    def __init__(self, features: int, outputs: int) -> None:
        self._features, self._outputs = features, outputs
        self._single: list[Array] = []  # triangle of z zT, and z xT, in float32
        self._double: list[Floats] = []
        self._small: tuple[Floats, ...] = ()
        self._rows = 0  # rows in the float32 sums

    def add(self, z: Array, t: Array, x: Array | None = None) -> None:
        """Add rows of float32 z (n, features), t (n, outputs) and, if that is not t, x (n, inputs)."""
        if not len(z):
            return
        f, o = self._features, self._outputs
        if not self._small:
            self._small = np.zeros(f), np.zeros(o), np.zeros(o), np.zeros(1)
        gram, cross = self._single or (None, None)
        product = z.T @ (t if x is None else x)
        self._single = [add_squares(gram, z), product if cross is None else plus(cross, product)]
        ones = np.ones(len(z), np.float32)
        for total, part in zip(self._small, (ones @ z, ones @ t, ones @ np.square(t), np.array([len(z)])), strict=True):
            np.add(total, part, out=total)
        self._rows += len(z)
        if self._rows >= TOGETHER:
            self.take()

    def take(self) -> None:
        """Move the float32 sums into the float64 sums."""
        if not self._rows:
            return
        parts = [part.astype(np.float64) for part in self._single]
        self._double = [plus(*pair) for pair in zip(self._double, parts, strict=True)] if self._double else parts
        self._single, self._rows = [], 0

    def drain(self) -> tuple[Floats, ...]:
        """Return the sums, the triangle of z zT first (empty arrays if no rows were added), and reset them."""
        self.take()
        found = (*self._double, *self._small) if self._double else (np.zeros(0),) * 6
        self._double, self._small = [], ()
        return found


def moments_of(gram: Floats, *others: Floats) -> Moments:
    """Convert the sums of `drain`, with a full z zT (features, features), to moments."""
    cross, z_total, t_total, energy, count = others
    wide = np.empty((len(gram) + 1,) * 2)
    wide[:-1, :-1] = gram
    wide[-1, :-1] = wide[:-1, -1] = z_total
    wide[-1, -1] = count[0]
    return Moments(wide, np.concatenate([cross.reshape(len(gram), -1), t_total[None]]), energy, int(count[0]))
