"""Operations of cubic cost, done by LAPACK on the host or by a backend that `using` selects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import linalg

from onnxgrail.algebra.moments.triangles import mirrored
from onnxgrail.core import Floats, Ints

LARGE = 2**16  # elements of a matrix from which operations are split into parts
PARTS, LEAST = 4, 32  # number of parts, and least rows or columns per part
WHOLE = 512  # rows of a matrix up to which it is factorized as a whole
BLOCK = 256  # rows of a triangle that SciPy solves at once: unlike NumPy's products it holds Python's lock


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A Cholesky factorization A = L Lᵀ, on any device.

    Attributes:
        diagonal: of L.
        solve: B -> A⁻¹ B.
    """

    diagonal: Floats
    solve: Callable[[Floats], Floats]


class Linear(Protocol):
    """A backend that computes in float64."""

    def product(self, left: Floats, right: Floats) -> Floats:
        """Compute the product of two matrices."""

    def picked(self, matrix: Floats, rows: Ints, columns: Ints) -> Floats:
        """Return the given rows and columns of a matrix, in this order."""

    def cholesky(self, matrix: Floats) -> Factor:
        """Factorize a symmetric matrix, which may be overwritten; LinAlgError if it is not positive definite."""

    def inverse(self, matrix: Floats) -> Floats:
        """Return the full inverse of a positive definite matrix; LinAlgError if it is not that, or not finite."""


@dataclass(frozen=True, slots=True)
class Host:
    """The NumPy and SciPy backend.

    Large operations are split into parts, always the same parts, so that results do not depend on the number of
    threads.

    Attributes:
        threads: number of threads.
    """

    threads: int = 1

    def product(self, left: Floats, right: Floats) -> Floats:
        """Compute the product of two matrices."""
        if left.size < LARGE:
            return np.asarray(left @ right)
        found = np.empty((len(left), right.shape[1]))

        def part(rows: slice) -> None:
            np.matmul(left[rows], right, out=found[rows])

        self._in_parts(part, len(left))
        return found

    def picked(self, matrix: Floats, rows: Ints, columns: Ints) -> Floats:
        """Return the given rows and columns of a matrix, in this order."""
        found = np.empty((len(rows), len(columns)))

        def part(some: slice) -> None:
            for first in range(some.start, some.stop, LEAST):  # so that intermediate rows stay in the cache
                few = slice(first, min(first + LEAST, some.stop))
                np.take(matrix[rows[few]], columns, axis=1, out=found[few], mode="clip")

        self._in_parts(part, len(rows))
        return found

    def cholesky(self, matrix: Floats) -> Factor:
        """Factorize a symmetric matrix, which may be overwritten."""
        factor = np.asfortranarray(matrix)
        self._factorise(factor)

        def solve(rhs: Floats) -> Floats:
            if factor.size < LARGE:
                return np.asarray(linalg.cho_solve((factor, True), rhs, check_finite=False), np.float64)
            found = np.empty(rhs.shape)

            def part(columns: slice) -> None:
                some = np.array(rhs[:, columns], order="C")
                forward(factor, some)
                backward(factor, some)
                found[:, columns] = some

            self._in_parts(part, rhs.shape[1])
            return found

        return Factor(np.diagonal(factor), solve)

    def _factorise(self, matrix: Floats) -> None:
        """Compute L of A = L Lᵀ in place by halves; elements above the diagonal are undefined."""
        if len(matrix) <= WHOLE:
            matrix[...] = linalg.cholesky(matrix, lower=True, check_finite=False)
            return
        half = len(matrix) // 2
        first, side, rest = matrix[:half, :half], matrix[half:, :half], matrix[half:, half:]

        def left(columns: slice) -> None:
            below = slice(columns.start, None)
            rest[below, columns] -= side[below] @ side[columns].T

        self._factorise(first)
        self._in_parts(lambda rows: forward(first, side[rows].T), len(side))
        self._in_parts(left, len(rest))
        self._factorise(rest)

    def _in_parts(self, work: Callable[[slice], None], count: int) -> None:
        """Call `work` for slices of `count` rows or columns, in threads."""
        each = max(-(-count // PARTS), LEAST)
        parts = iter([slice(first, min(first + each, count)) for first in range(0, count, each)])

        def some() -> None:
            for one in parts:  # the iterator is shared by all threads
                work(one)

        helpers = [_helpers(self.threads - 1).submit(some) for _ in range(1, self.threads) if count > each]
        try:
            some()
        finally:
            for helper in helpers:
                helper.result()

    def inverse(self, matrix: Floats) -> Floats:
        """Return the full inverse of a positive definite matrix."""
        factor = linalg.cholesky(matrix, lower=True, check_finite=False)
        if not np.isfinite(factor[-1]).all():  # LAPACK does not report NaN; the last row depends on all others
            raise np.linalg.LinAlgError("not finite")
        return mirrored(linalg.lapack.dpotri(factor, lower=1, overwrite_c=1)[0])


def forward(lower: Floats, rhs: Floats) -> None:
    """Compute B := L⁻¹ B in place, for L (n, n), of which only the lower triangle is read, and B (n, k)."""
    for first in range(0, len(lower), BLOCK):
        rows = slice(first, first + BLOCK)
        if first:
            rhs[rows] -= lower[rows, :first] @ rhs[:first]
        rhs[rows] = linalg.blas.dtrsm(1.0, lower[rows, rows], rhs[rows].T, side=1, lower=1, trans_a=1).T


def backward(lower: Floats, rhs: Floats) -> None:
    """Compute B := L⁻ᵀ B in place; arrays as in `forward`."""
    for first in reversed(range(0, len(lower), BLOCK)):
        rows, after = slice(first, first + BLOCK), slice(first + BLOCK, None)
        if first + BLOCK < len(lower):
            rhs[rows] -= lower[after, rows].T @ rhs[after]
        rhs[rows] = linalg.blas.dtrsm(1.0, lower[rows, rows], rhs[rows].T, side=1, lower=1).T


@functools.cache
def _helpers(count: int) -> ThreadPoolExecutor:
    """Return a pool of helper threads; cached, because starting threads costs as much as many a part."""
    return ThreadPoolExecutor(count)


HOST = Host()
_chosen: ContextVar[Linear] = ContextVar("linear", default=HOST)


@contextmanager
def using(linear: Linear) -> Iterator[None]:
    """Compute with another backend within a with-block."""
    token = _chosen.set(linear)
    try:
        yield
    finally:
        _chosen.reset(token)


def linear() -> Linear:
    """Return the current backend."""
    return _chosen.get()
