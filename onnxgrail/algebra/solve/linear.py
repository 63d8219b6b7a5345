"""Operations of cubic cost, done by NumPy on the host or by a backend that `using` selects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from onnxgrail.algebra.moments.triangles import mirrored
from onnxgrail.core import Floats, Ints

LARGE = 2**16  # elements of a matrix from which operations are split into parts
PARTS, LEAST = 4, 32  # number of parts, and least rows or columns per part
WHOLE = 1024  # largest matrix that is factorized by one call of LAPACK, which then is as fast with one thread
BLOCK = 256  # rows of larger ones that are factorized and inverted at once


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

    def squares(self, rows: Floats) -> Floats:
        """Compute Z Zᵀ (r, r) of a matrix Z (r, h)."""

    def picked(self, matrix: Floats, rows: Ints, columns: Ints) -> Floats:
        """Return the given rows and columns of a matrix, in this order."""

    def cholesky(self, matrix: Floats) -> Factor:
        """Factorize a symmetric matrix, which may be overwritten; LinAlgError if it is not positive definite."""

    def inverse(self, matrix: Floats) -> Floats:
        """Return the full inverse of a positive definite matrix; LinAlgError if it is not that, or not finite."""


@dataclass(frozen=True, slots=True)
class Host:
    """The NumPy backend.

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
        found = np.empty((len(left), right.shape[1]), np.result_type(left, right))

        def part(rows: slice) -> None:
            np.matmul(left[rows], right, out=found[rows])

        self._in_parts(part, found, 0, left.shape[1])
        return found

    def squares(self, rows: Floats) -> Floats:
        """Compute Z Zᵀ (r, r) of a matrix Z (r, h): the lower half, which is mirrored."""
        found = np.empty((len(rows), len(rows)), rows.dtype)

        def part(some: slice) -> None:
            for first in range(some.start, some.stop, BLOCK):
                few, columns = slice(first, min(first + BLOCK, some.stop)), slice(0, min(first + BLOCK, some.stop))
                np.matmul(rows[few], rows[columns].T, out=found[few, columns])

        self._in_parts(part, found, 0, rows.shape[1])
        return mirrored(found)

    def picked(self, matrix: Floats, rows: Ints, columns: Ints) -> Floats:
        """Return the given rows and columns of a matrix, in this order."""
        found = np.empty((len(rows), len(columns)), matrix.dtype)

        def part(some: slice) -> None:
            for first in range(some.start, some.stop, LEAST):  # so that intermediate rows stay in the cache
                few = slice(first, min(first + LEAST, some.stop))
                np.take(matrix[rows[few]], columns, axis=1, out=found[few], mode="clip")

        self._in_parts(part, found, 0, 1)
        return found

    def cholesky(self, matrix: Floats) -> Factor:
        """Factorize a symmetric matrix, which may be overwritten."""
        return self.factor(self._triangle(matrix))

    def _triangle(self, matrix: Floats) -> Floats:
        """Return L (n, n) of A = L Lᵀ; elements above the diagonal are undefined."""
        lower = np.ascontiguousarray(matrix)
        if len(lower) <= WHOLE:
            factorize(lower)
        else:
            self._factorize_in_blocks(lower)
        return lower

    def factor(self, lower: Floats) -> Factor:
        """Return the factor with a lower triangle (n, n); what stands above the diagonal is not read."""

        def solve(rhs: Floats) -> Floats:
            right = rhs if rhs.ndim == 2 else rhs[:, None]
            found = np.empty(right.shape, lower.dtype, order="F")

            def part(columns: slice) -> None:
                found[:, columns] = right[:, columns]
                substitute(lower, found[:, columns])

            if found.size:
                self._in_parts(part, found, 1, len(lower))
            return found.reshape(rhs.shape)

        return Factor(np.diagonal(lower), solve)

    def _factorize_in_blocks(self, matrix: Floats) -> None:
        """Compute L of A = L Lᵀ in place; elements above the diagonal are undefined."""
        for first in range(0, len(matrix), BLOCK):
            own, below = matrix[first:, first : first + BLOCK], matrix[first + BLOCK :, first : first + BLOCK]
            done = matrix[first:, :first]

            def subtract(rows: slice, own: Floats = own, done: Floats = done) -> None:
                own[rows] -= done[rows] @ done[:BLOCK].T

            if first:
                self._in_parts(subtract, own, 0, first)
            block = own[:BLOCK].copy()
            factorize(block)
            own[:BLOCK] = block
            inverse = inverted(block)

            def divide(rows: slice, below: Floats = below, inverse: Floats = inverse) -> None:
                below[rows] = below[rows] @ inverse.T

            self._in_parts(divide, below, 0, BLOCK)

    def _in_parts(self, work: Callable[[slice], None], target: Floats, axis: int, depth: int) -> None:
        """Call `work` for the parts of a target that it writes.

        Args:
            work: writes the rows or columns of a slice.
            target: what it writes.
            axis: 0 for rows, 1 for columns.
            depth: products that each number of the target is the sum of.
        """
        self._in_threads(work, parts_of(target.shape[axis]))

    def _in_threads(self, work: Callable[[slice], None], parts: Sequence[slice]) -> None:
        """Call `work` for each part, in threads."""
        left = iter(parts)

        def some() -> None:
            for one in left:  # the iterator is shared by all threads
                work(one)

        helpers = [_helpers(self.threads - 1).submit(some) for _ in range(1, self.threads) if len(parts) > 1]
        try:
            some()
        finally:
            for helper in helpers:
                helper.result()

    def inverse(self, matrix: Floats) -> Floats:
        """Return the full inverse of a positive definite matrix.

        From row r on, the columns from r on are the solution with the rest of L alone, which halves the work.
        """
        lower = self._triangle(matrix.copy())
        if 0 < len(lower) <= 2 * WHOLE:  # LAPACK takes half the time of the parts, in one thread
            return _finite(mirrored(_lapack("potri", lower)(lower.T, lower=0, overwrite_c=1)[0].T))
        found = np.empty_like(lower)

        def part(columns: slice) -> None:
            rest = slice(columns.start, None)
            some = np.eye(len(lower) - columns.start, columns.stop - columns.start).T.copy().T
            substitute(lower[rest, rest], some)
            found[rest, columns] = some

        self._in_threads(part, parts_of(len(lower), 2 * PARTS))
        return _finite(mirrored(found))


def _finite(matrix: Floats) -> Floats:
    """Return the matrix; LinAlgError if a number is not finite."""
    if not np.isfinite(matrix).all():
        raise np.linalg.LinAlgError("not finite")
    return matrix


def parts_of(count: int, parts: int = PARTS) -> list[slice]:
    """Return the parts of `count` rows or columns."""
    each = max(-(-count // parts), LEAST)
    return [slice(first, min(first + each, count)) for first in range(0, count, each)]


def factorize(matrix: Floats) -> None:
    """Compute L of A = L Lᵀ in place, by LAPACK; elements above the diagonal are undefined."""
    if not len(matrix):
        return
    # LAPACK stores columns one after the other, so it sees Lᵀ.
    found, minor = _lapack("potrf", matrix)(matrix.T, lower=0, clean=0, overwrite_a=1)
    if minor:
        raise np.linalg.LinAlgError(f"the leading minor of order {minor} is not positive definite")
    if not np.shares_memory(found, matrix):
        matrix[...] = found.T


def inverted(lower: Floats) -> Floats:
    """Return the inverse of a lower triangle L (n, n); what stands above the diagonal is not read."""
    found, zero = _lapack("trtri", lower)(np.tril(lower).T, lower=0)
    if zero:
        raise np.linalg.LinAlgError(f"element {zero} of the diagonal is 0")
    return np.asarray(found.T)


def substitute(lower: Floats, rhs: Floats) -> None:
    """Compute B := L⁻ᵀ L⁻¹ B in place, for B in the order of columns; what stands above the diagonal is not read."""
    found, _ = _lapack("potrs", lower)(lower.T, rhs, lower=0, overwrite_b=1)
    if not np.shares_memory(found, rhs):
        rhs[...] = found


def _lapack(name: str, matrix: Floats) -> Any:
    """Return a function of LAPACK for the precision of a matrix."""
    from scipy.linalg import lapack  # slow to import, and not needed without fits

    return getattr(lapack, ("s" if matrix.dtype == np.float32 else "d") + name)


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
