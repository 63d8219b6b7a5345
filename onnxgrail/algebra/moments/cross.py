"""Sums over rows of regressors and targets, one batch at a time."""

from __future__ import annotations

import numpy as np

from onnxgrail.algebra.moments.gram import plus
from onnxgrail.algebra.moments.regression import Moments
from onnxgrail.algebra.moments.triangles import add_squares, length
from onnxgrail.algebra.moments.waiting import Waiting
from onnxgrail.core import Array, Floats

TOGETHER = 8192  # rows whose products are summed in float32


class Pairs:
    """Sums of z zT and z xT, added in the order of the calls, in place.

    x are the targets t, or the inputs that t are products of. Products of a few thousand rows are summed in float32,
    and these sums in float64. As in `gram.Sums`, the sums leave in float32 if there are several panels.
    """

    def __init__(self, features: int, outputs: int) -> None:
        self._features, self._outputs = features, outputs
        self._waiting = Waiting()
        self._single: list[Array] = []  # triangle of z zT, and z xT, in float32
        self._double: list[Floats] = []
        self._small: tuple[Floats, ...] = ()
        self._rows = 0  # rows in the float32 sums

    def add(self, z: Array, t: Array, x: Array | None = None) -> None:
        """Add rows of float32 z (n, features), t (n, outputs) and, if that is not t, x (n, inputs)."""
        if len(z):
            self._include(*self._waiting.add(z, t, *(() if x is None else (x,))))

    def _include(self, *rows: Array) -> None:
        if not rows:
            return
        z, t, x = rows if len(rows) == 3 else (*rows, rows[1])
        if not self._small:
            self._small = tuple(map(np.zeros, (self._features, x.shape[1], self._outputs, 1)))
        gram, cross = self._single or (None, None)
        product = z.T @ x
        self._single = [add_squares(gram, z), product if cross is None else plus(cross, product)]
        ones = np.ones(len(z), np.float32)
        for total, part in zip(self._small, (ones @ z, ones @ x, ones @ np.square(t), np.array([len(z)])), strict=True):
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
        self._include(*self._waiting.all())
        several = length(self._features) < self._features**2
        if self._double or not several:
            self.take()
        sums = [part.astype(np.float32) for part in self._double] if several and self._double else self._double
        sums = sums or self._single
        found = (*sums, *self._small) if sums else (np.zeros(0),) * 6
        self._single, self._double, self._small, self._rows = [], [], (), 0
        return found


def moments_of(gram: Floats, *others: Floats, dense: Array | None = None) -> Moments:
    """Convert the sums of `drain`, with a full z zT (features, features), to moments.

    Args:
        gram: z zT.
        others: the other sums.
        dense: W (inputs, outputs) if the targets are t = Wᵀ x and products with x were summed.
    """
    cross, z_total, x_total, energy, count = others
    wide = np.empty((len(gram) + 1,) * 2, gram.dtype)
    wide[:-1, :-1] = gram
    wide[-1, :-1] = wide[:-1, -1] = z_total
    wide[-1, -1] = count[0]
    cross = np.concatenate([cross.reshape(len(gram), -1), x_total[None]], dtype=gram.dtype)
    return Moments(wide, cross, energy, int(count[0]), dense)
