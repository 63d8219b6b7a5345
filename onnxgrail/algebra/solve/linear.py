"""Operations of cubic cost, done by NumPy on the host or by a backend that `using` selects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from onnxgrail.algebra.moments.triangles import mirrored
from onnxgrail.core import Floats, Ints

LARGE = 2**16  # elements of a matrix from which operations are split into parts
PARTS, LEAST = 4, 32  # number of parts, and least rows or columns per part
BLOCK = 256  # rows of a triangle that are factorized and inverted at once


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

        self._in_parts(part, len(left))
        return found

    def picked(self, matrix: Floats, rows: Ints, columns: Ints) -> Floats:
        """Return the given rows and columns of a matrix, in this order."""
        found = np.empty((len(rows), len(columns)), matrix.dtype)

        def part(some: slice) -> None:
            for first in range(some.start, some.stop, LEAST):  # so that intermediate rows stay in the cache
                few = slice(first, min(first + LEAST, some.stop))
                np.take(matrix[rows[few]], columns, axis=1, out=found[few], mode="clip")

        self._in_parts(part, len(rows))
        return found

    def cholesky(self, matrix: Floats) -> Factor:
        """Factorize a symmetric matrix, which may be overwritten."""
        lower = np.ascontiguousarray(matrix)
        inverses = self._factorise(lower)

        def solve(rhs: Floats) -> Floats:
            found = np.array(rhs, lower.dtype, order="C")
            self._in_parts(lambda columns: substitute(lower, inverses, found[:, columns]), rhs.shape[1])
            return found

        return Factor(np.diagonal(lower), solve)

    def _factorise(self, matrix: Floats) -> list[Floats]:
        """Compute L of A = L Lᵀ in place, and return the inverses of its diagonal blocks.

        Elements above the diagonal are undefined.
        """
        inverses: list[Floats] = []
        for first in range(0, len(matrix), BLOCK):
            own, below = matrix[first:, first : first + BLOCK], matrix[first + BLOCK :, first : first + BLOCK]
            done = matrix[first:, :first]

            def subtract(rows: slice, own: Floats = own, done: Floats = done) -> None:
                own[rows] -= done[rows] @ done[:BLOCK].T

            def divide(rows: slice, below: Floats = below) -> None:
                below[rows] = below[rows] @ inverses[-1].T

            if first:
                self._in_parts(subtract, len(own))
            own[:BLOCK] = np.linalg.cholesky(own[:BLOCK])
            inverses.append(inverted(own[:BLOCK]))
            self._in_parts(divide, len(below))
        return inverses

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
        found = self.cholesky(matrix.copy()).solve(np.eye(len(matrix)))
        if not np.isfinite(found).all():
            raise np.linalg.LinAlgError("not finite")
        return mirrored(found)


def inverted(lower: Floats) -> Floats:
    """Return the inverse of a lower triangle L (n, n), from those of its halves; LinAlgError if it is singular."""
    half = len(lower) // 2
    if half < LEAST:
        return np.asarray(np.linalg.inv(lower))
    first, last = inverted(lower[:half, :half]), inverted(lower[half:, half:])
    found = np.zeros_like(lower)
    found[:half, :half], found[half:, half:] = first, last
    found[half:, :half] = -(last @ lower[half:, :half] @ first)
    return found


@np.errstate(over="ignore", invalid="ignore")  # solutions are checked later
def substitute(lower: Floats, inverses: Sequence[Floats], rhs: Floats) -> None:
    """Compute B := L⁻ᵀ L⁻¹ B in place, given the inverses of the diagonal blocks of L: all work is products."""
    blocks = [slice(first, first + BLOCK) for first in range(0, len(lower), BLOCK)]
    for rows, inverse in zip(blocks, inverses, strict=True):
        rest = rhs[rows] - lower[rows, : rows.start] @ rhs[: rows.start] if rows.start else rhs[rows]
        rhs[rows] = inverse @ rest
    for rows, inverse in zip(reversed(blocks), reversed(inverses), strict=True):
        rest = rhs[rows] - lower[rows.stop :, rows].T @ rhs[rows.stop :] if rows.stop < len(lower) else rhs[rows]
        rhs[rows] = inverse.T @ rest


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
