"""The three operations of cubic cost, done by LAPACK on the host or by whatever `using` puts in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import linalg

from onnxgrail.core import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A Cholesky factorisation A = L Lᵀ, wherever it lies.

    Attributes:
        diagonal: of L.
        solve: B -> A⁻¹ B.
    """

    diagonal: Floats
    solve: Callable[[Floats], Floats]


class Linear(Protocol):
    """Something that computes in float64."""

    def product(self, left: Floats, right: Floats) -> Floats:
        """The product of two matrices."""

    def cholesky(self, matrix: Floats) -> Factor:
        """The factor of a symmetric matrix, which may be written over; LinAlgError where it is not positive."""

    def inverse(self, matrix: Floats) -> Floats:
        """A⁻¹ of a positive definite matrix, all of it; LinAlgError where it is not that, or not finite."""


class Host:
    """NumPy and SciPy."""

    def product(self, left: Floats, right: Floats) -> Floats:
        """The product of two matrices."""
        return np.asarray(left @ right)

    def cholesky(self, matrix: Floats) -> Factor:
        """The factor of a symmetric matrix, which may be written over."""
        factor = linalg.cholesky(matrix, lower=True, overwrite_a=True, check_finite=False)

        def solve(rhs: Floats) -> Floats:
            return np.asarray(linalg.cho_solve((factor, True), rhs, check_finite=False), np.float64)

        return Factor(np.diagonal(factor), solve)

    def inverse(self, matrix: Floats) -> Floats:
        """A⁻¹ of a positive definite matrix, all of it."""
        factor = linalg.cholesky(matrix, lower=True, check_finite=False)
        if not np.isfinite(factor[-1]).all():  # the last row has seen all others; NaN passes through LAPACK unseen
            raise np.linalg.LinAlgError("not finite")
        half = linalg.lapack.dpotri(factor, lower=1, overwrite_c=1)[0]  # above the diagonal stay the factor's zeros
        whole = half + half.T
        whole.flat[:: len(whole) + 1] *= 0.5
        return np.asarray(whole)


HOST = Host()
_chosen: ContextVar[Linear] = ContextVar("linear", default=HOST)


@contextmanager
def using(linear: Linear) -> Iterator[None]:
    """Have another one compute within a with-block."""
    token = _chosen.set(linear)
    try:
        yield
    finally:
        _chosen.reset(token)


def linear() -> Linear:
    """What computes now."""
    return _chosen.get()
