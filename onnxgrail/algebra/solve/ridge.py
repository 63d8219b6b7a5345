"""Solves symmetric positive semidefinite systems with a ridge; solutions are always finite."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from onnxgrail.algebra.solve.linear import Factor, linear
from onnxgrail.core import Floats
from onnxgrail.errors import DataError

GROWTHS = 6  # most tenfold increases of the ridge before the eigenvalue fallback
SOME = 16  # columns of a float32 solution that are checked
ROWS = 256  # of a float32 matrix that are multiplied in float64 at once
LOSS = 1e-7  # share of the explained squares that a float32 solution may lose
FLOOR = 1e-10  # smallest eigenvalue that is trusted, as a share of the largest

Solver = Callable[[Floats], Floats]
"""Solves one system for many right-hand sides."""


def ridge_solve(gram: Floats, rhs: Floats, lam: float, *, dual: bool = False) -> tuple[Floats, float]:
    """Compute X = (A + λI)⁻¹ B, in float64, or in float32 if A has that type and the solution is good enough.

    A float32 solution X̃ is good if Σ (X̃ − X)ᵀ (A + λI) (X̃ − X) is at most 1e-7 of Σ Xᵀ B, over some columns. For a
    regression that is the share of the explained squares that X̃ loses. For the `dual` problem, with A = Z Zᵀ and
    weights Zᵀ X, this share is at most |R|² / Σ (A X)ᵀ B with the residual R. An X̃ that is not good is corrected once
    by the solution for its residual, in float64, and judged again.

    Cholesky first; if it fails, λ grows tenfold, at most six times (not from λ = 0); then eigenvalues are raised to
    1e-10 of the largest; then least squares of smallest norm. A Cholesky pivot that is rounding error counts as
    failure, so the solution stays moderate for a singular A.

    Args:
        gram: A (k, k), symmetric positive semidefinite up to rounding, float32 or float64.
        rhs: B (k, n).
        lam: λ ≥ 0, in units of A.
        dual: judge a float32 solution by the weights Zᵀ X.

    Returns:
        X (k, n), and the λ that was used: `lam` if Cholesky succeeded at once, otherwise more.

    Raises:
        DataError: A, B or λ is not finite, or λ is negative.

    References:
        Golub and Van Loan, Matrix Computations, 4th edition, sections 4.2 (Cholesky) and 5.5 (rank deficiency).
    """
    if gram.dtype == np.float32:
        solution = _single(gram, rhs, lam, dual=dual)
        if solution is not None:
            return solution, lam
        gram, rhs = gram.astype(np.float64), rhs.astype(np.float64)
    solution = _cholesky(gram, rhs, lam) if 0.0 <= lam < np.inf else None
    if solution is not None:
        return solution, lam  # a finite solution implies finite arguments
    if not (np.isfinite(gram).all() and np.isfinite(rhs).all() and 0.0 <= lam < np.inf):
        raise DataError("a ridge solve got NaN, infinity or a negative ridge", hint="Check weights and activations.")
    for growth in range(1, GROWTHS + 1 if lam else 1):
        used = lam * 10.0**growth
        solution = _cholesky(gram, rhs, used)
        if solution is not None:
            return solution, used
    return _by_eigenvalues(gram, rhs, lam)


def ridge_factor(gram: Floats, ridge: Floats | float = 0.0) -> Solver | None:
    """Return a function B -> (A + diag(r))⁻¹ B, to solve for many B; None if the matrix is numerically singular.

    Systems of float32 are solved in that type where this is good enough, see `ridge_solve`. A solution that is not
    finite in float64 is replaced by zeros.

    Args:
        gram: A (k, k), float32 or float64; it must not change while the function is used.
        ridge: r (k,), or the same value for all.
    """
    tried = _tried(gram, ridge)
    if tried is None:
        return None

    def solve(rhs: Floats) -> Floats:
        solution = tried(rhs)
        return np.zeros(rhs.shape) if solution is None else solution

    return solve


def ridge_solver(gram: Floats, ridge: Floats | float = 0.0) -> Solver:
    """Return a function B -> (A + diag(r))⁻¹ B, to solve for many B; singular systems are solved as in `ridge_solve`.

    Args:
        gram: A (k, k), float32 or float64; it must not change while the function is used.
        ridge: r (k,), or the same value for all.

    Raises:
        DataError: A, r or B is not finite.
    """
    tried = _tried(gram, ridge)

    def solve(rhs: Floats) -> Floats:
        solution = None if tried is None else tried(rhs)
        if solution is None:
            whole = gram.astype(np.float64)
            np.einsum("kk->k", whole)[...] += ridge
            solution, _ = ridge_solve(whole, rhs, 0.0)
        return solution

    return solve


def _tried(gram: Floats, ridge: Floats | float) -> Callable[[Floats], Floats | None] | None:
    """Return a function like that of `ridge_factor` that returns None for a solution that is not finite."""
    single = gram.dtype == np.float32
    factor = _factor(gram.copy(), ridge)
    wide = functools.cache(lambda: _factor(gram.astype(np.float64), ridge) if single else factor)
    if factor is None and wide() is None:
        return None

    def solve(rhs: Floats) -> Floats | None:
        if not single:
            return None if factor is None else _substituted(factor, rhs)
        solution = None if factor is None else _refined(gram, rhs, ridge, factor)
        if solution is None and (double := wide()) is not None:
            solution = _substituted(double, rhs)
        return solution

    return solve


def _single(gram: Floats, rhs: Floats, lam: float, *, dual: bool) -> Floats | None:
    """Return the solution that a float32 factor gives, or None if it is not good enough."""
    factor = _factor(gram.copy(), lam)
    return None if factor is None else _refined(gram, rhs, lam, factor, dual=dual)


def _refined(gram: Floats, rhs: Floats, ridge: Floats | float, factor: Factor, *, dual: bool = False) -> Floats | None:
    """Return the solution in float32 if some columns are good enough, see `ridge_solve`.

    Otherwise it is corrected once by the solution for its residual, which costs less than a factor in float64.

    Returns:
        X in float32, or in float64 after the correction; None if it is still not good enough.
    """
    some = slice(None, None, -(-rhs.shape[1] // SOME) or 1)
    solution = _substituted(factor, rhs)
    for last in (False, True):
        if solution is None:
            break
        few, goal = solution[:, some].astype(np.float64), rhs[:, some]
        rest = _residual(gram, few, goal, ridge)
        if dual:
            product = goal - rest - ridge * few
            lost, explained = np.vdot(rest, rest), np.vdot(product, goal)
        else:
            lost, explained = np.vdot(rest, factor.solve(rest)), np.vdot(few, goal)
        if lost <= LOSS * explained:
            return solution
        if last:
            break
        solution = solution.astype(np.float64)
        solution += factor.solve(_residual(gram, solution, rhs, ridge))
    return None


def _residual(gram: Floats, solution: Floats, rhs: Floats, ridge: Floats | float) -> Floats:
    """Compute B − (A + diag(r)) X in float64 for A in float32, a few rows at a time, which stay in the cache."""
    found = rhs - np.reshape(ridge, (-1, 1)) * solution
    for first in range(0, len(gram), ROWS):
        found[first : first + ROWS] -= gram[first : first + ROWS].astype(np.float64) @ solution
    return found


def _cholesky(gram: Floats, rhs: Floats, lam: float) -> Floats | None:
    """Return the solution, or None if A + λI is not numerically positive definite."""
    factor = _factor(gram.copy(), lam)
    return None if factor is None else _substituted(factor, rhs)


def _factor(gram: Floats, ridge: Floats | float) -> Factor | None:
    """Return the Cholesky factor of A + diag(r), or None if that is not positive definite; A may be overwritten."""
    np.einsum("kk->k", gram)[...] += ridge
    diagonal = np.diagonal(gram).copy()
    try:
        factor = linear().cholesky(gram)
    except np.linalg.LinAlgError:
        return None
    # A pivot that lost all its digits to cancellation is noise. Relative to its own diagonal, so scales may differ.
    noise = len(gram) * np.finfo(np.float64).eps * diagonal
    return factor if (factor.diagonal**2 > noise).all() else None  # also None for NaN or infinity


def _substituted(factor: Factor, rhs: Floats) -> Floats | None:
    """Solve for B with a factor; None if the solution is not finite."""
    solution = factor.solve(rhs)
    return solution if np.isfinite(solution).all() else None


def _by_eigenvalues(gram: Floats, rhs: Floats, lam: float) -> tuple[Floats, float]:
    """Return the solution with eigenvalues of A + λI raised to the floor, else the least-squares solution."""
    shifted = gram + lam * np.eye(len(gram))
    try:
        values, vectors = np.linalg.eigh(shifted)
    except np.linalg.LinAlgError:
        values, vectors = np.zeros(1), np.eye(len(gram))
    floor = FLOOR * float(values[-1])
    if floor > 0.0:
        solution = vectors @ ((vectors.T @ rhs) / np.maximum(values, floor)[:, None])
        if np.isfinite(solution).all():
            return solution, lam + floor
    solution = np.asarray(np.linalg.lstsq(shifted, rhs, rcond=FLOOR)[0], np.float64)
    return np.nan_to_num(solution, nan=0.0, posinf=0.0, neginf=0.0), lam + FLOOR
