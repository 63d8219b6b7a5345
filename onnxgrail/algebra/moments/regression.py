"""Sums over rows of regressors and targets, of which least squares are solved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxgrail.algebra.solve.linear import linear
from onnxgrail.core import Array, Floats


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over rows of z with an appended constant 1, (f + 1,), and of targets t, (o,).

    `gram` and `cross` are float64, or float32 if there are many features.

    Attributes:
        gram: sum z zT (f + 1, f + 1).
        cross: sum z tT (f + 1, o), or sum z xT (f + 1, i) if the targets are t = Wᵀ x.
        energy: sum t * t (o,).
        count: number of rows.
        dense: W (i, o), or None.
    """

    gram: Floats
    cross: Floats
    energy: Floats
    count: int
    dense: Array | None = None

    def __add__(self, other: Moments) -> Moments:
        """Return the sums over both sets of rows."""
        gram, cross, energy = self.gram + other.gram, self.cross + other.cross, self.energy + other.energy
        return Moments(gram, cross, energy, self.count + other.count, self.dense)

    def targets(self, some: slice = slice(None)) -> Floats:
        """Return sum z tT (f + 1, s) for a slice of the outputs."""
        if self.dense is None:
            return self.cross[:, some]
        return linear().product(self.cross.astype(self.dense.dtype, copy=False), self.dense[:, some])

    def within(self, basis: Floats) -> Moments:
        """Return the moments in the coordinates of an orthonormal basis (f, r) of z: Bᵀ z and the constant."""
        side = linear().product(self.gram[:, :-1], basis)
        gram = np.concatenate([basis.T @ side[:-1], side[-1:]])
        gram = np.concatenate([gram, np.append(side[-1], self.gram[-1, -1])[:, None]], axis=1)
        cross = np.concatenate([linear().product(basis.T, self.cross[:-1]), self.cross[-1:]])
        return Moments(gram, cross, self.energy, self.count, self.dense)

    def outputs(self, some: slice) -> Moments:
        """Return the moments of a slice of the outputs."""
        if self.dense is None:
            return Moments(self.gram, self.cross[:, some], self.energy[some], self.count)
        return Moments(self.gram, self.cross, self.energy[some], self.count, self.dense[:, some])


def zero_moments(features: int, outputs: int, dense: Array | None = None) -> Moments:
    """Return the moments of zero rows."""
    cross = np.zeros((features + 1, outputs if dense is None else len(dense)))
    return Moments(np.zeros((features + 1,) * 2), cross, np.zeros(outputs), 0, dense)


def moments(z: Array, t: Array) -> Moments:
    """Compute sums over rows of z (n, f) and t (n, o): products in their own precision, sums in float64."""
    wide = np.concatenate([z, np.ones((len(z), 1), dtype=z.dtype)], axis=1)
    gram, cross = (np.asarray(wide.T @ other, dtype=np.float64) for other in (wide, t))
    return Moments(gram, cross, np.einsum("no,no->o", t, t, dtype=np.float64), len(z))


def error(sums: Moments, weights: Floats) -> float:
    """Compute the sum of squared errors of t ~ wT [z, 1] over rows and outputs, for w (f + 1, o); never negative."""
    return error_of(sums.energy, weights, sums.gram @ weights, sums.targets())


def error_of(energy: Floats, weights: Floats, product: Floats, targets: Floats) -> float:
    """Compute `error` with given `energy`, `gram @ weights` and `targets()`."""
    quadratic = dot(weights, product) - 2.0 * dot(weights, targets)
    return max(float(energy.sum() + quadratic), 0.0)


def dot(left: Floats, right: Floats) -> float:
    """Compute the sum of the products of corresponding numbers of two matrices, in float64."""
    return float(np.einsum("fo,fo->", left, right, dtype=np.float64))
