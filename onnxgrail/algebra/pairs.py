"""Sums over rows of regressors and targets, one batch at a time."""

from __future__ import annotations

import numpy as np
from scipy.linalg import blas

from onnxgrail.algebra.gram import syrk
from onnxgrail.algebra.refit import Moments
from onnxgrail.core import Array, Floats

TOGETHER = 8192  # rows whose products are summed in float32


class Pairs:
    """Sums of z zT and z tT, in the order of the calls; BLAS adds to them in place.

    Products of some thousand rows are added up in float32, and these sums in float64.
    """

    def __init__(self, features: int, outputs: int) -> None:
        self._features, self._outputs = features, outputs
        self._double: tuple[Floats, ...] = ()
        self._gram, self._cross = np.zeros((2, 0), np.float32)
        self._rows = 0  # in float32

    def add(self, z: Array, t: Array) -> None:
        """Add rows of float32 z (n, features) and t (n, outputs)."""
        if not len(z):
            return
        if not self._gram.size:
            self._gram = np.zeros((self._features, self._features), np.float32, order="F")
            self._cross = np.zeros((self._features, self._outputs), np.float32)
        if not self._double:
            self._double = self._zeros()
        self._gram = syrk(z[None].transpose(0, 2, 1), self._gram)
        blas.sgemm(1.0, t.T, z.T, trans_b=1, beta=1.0, c=self._cross.T, overwrite_c=1)
        _, _, z_total, t_total, energy, count = self._double
        ones = np.ones(len(z), np.float32)
        z_total += ones @ z
        t_total += ones @ t
        energy += np.einsum("no,no->o", t, t, dtype=np.float64)
        count += len(z)
        self._rows += len(z)
        if self._rows >= TOGETHER:
            self._take()

    def _zeros(self) -> tuple[Floats, ...]:
        f, o = self._features, self._outputs
        return tuple(np.zeros(shape) for shape in ((f, f), (f, o), f, o, o, 1))

    def _take(self) -> None:
        for total, part in zip(self._double, (self._gram.T, self._cross), strict=False):
            np.add(total, part, out=total)
            part.fill(0)
        self._rows = 0

    def drain(self) -> tuple[Floats, ...]:
        """What was added, the lower triangle of z zT first; empty arrays where nothing was.  Then all begins anew."""
        if self._rows:
            self._take()
        found, self._double = self._double or (np.zeros(0),) * 6, ()
        return found


def moments_of(gram: Floats, *others: Floats) -> Moments:
    """The sums of `drain`, with z zT (features, features) made whole."""
    cross, z_total, t_total, energy, count = others
    wide = np.empty((len(gram) + 1,) * 2)
    wide[:-1, :-1] = gram
    wide[-1, :-1] = wide[:-1, -1] = z_total
    wide[-1, -1] = count[0]
    return Moments(wide, np.concatenate([cross.reshape(len(gram), -1), t_total[None]]), energy, int(count[0]))
