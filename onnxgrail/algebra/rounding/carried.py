"""Rounding input by input, with each error carried on to the inputs that are not rounded yet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from onnxgrail.algebra.rounding.grid import coded, nearest, searched
from onnxgrail.algebra.solve.linear import factorize, inverted, linear
from onnxgrail.algebra.solve.ridge import GROWTHS
from onnxgrail.core import Floats, Grid, Rounded

DAMPING = 1e-2  # ridge as a share of the mean second moment
PANEL = 128  # inputs whose errors are applied to later panels at once

Nearest = Callable[[Floats, int | slice], Floats]
"""Returns the nearest numbers that can be stored, of some rows of a matrix."""


def carried(weights: Floats, upper: Floats | None, grid: Grid) -> Rounded:
    """Round a matrix so that its products with the inputs change little.

    The inputs are rounded in order. The error of each is made up for by all later ones, by the same update of the
    inverse as in `elimination`: with A⁻¹ = UᵀU, w_k ← w_k − (w_j − q_j) U_jk / U_jj for k > j. The scale of a block is
    searched when its first input is reached, with the errors weighted by 1 / U_jj², which is what an error costs after
    all later inputs made up for it.

    Args:
        weights: (f, o) the best numbers.
        upper: (f, f) U of the second moments of the inputs, see `factor`.
        grid: the form.

    References:
        Frantar et al. 2022, GPTQ, arXiv:2210.17323; Hassibi and Stork 1993, Optimal Brain Surgeon.
    """
    if upper is None:
        return nearest(weights, grid)
    codes = np.empty(weights.shape, np.uint8)
    scales, zeros = np.ones((2, grid.blocks(len(weights)), weights.shape[1]))
    costs = 1.0 / np.square(np.diagonal(upper))

    def step(place: int, left: Floats) -> Floats:
        block = place // grid.size
        if place % grid.size == 0:
            rows = slice(place, min(place + grid.size, len(left)))
            scales[block], zeros[block] = searched(left[rows], costs[rows], grid)
        code = coded(left[place], scales[block], zeros[block], grid)
        codes[place] = code
        return np.asarray((code - zeros[block]) * scales[block])

    _carry(weights, upper, PANEL if grid.size >= len(weights) else max(1, PANEL // grid.size) * grid.size, step)
    return Rounded(codes, scales.astype(grid.dtype), zeros.astype(np.uint8), grid)


def carried_to(weights: Floats, gram: Floats, stored: Nearest) -> Floats:
    """Round a matrix as `carried` does, with scales and zero points that are known; return its numbers (f, o)."""
    upper = factor(gram)
    if upper is None:
        return stored(weights, slice(None))
    found = np.empty(weights.shape)

    def step(place: int, left: Floats) -> Floats:
        found[place] = stored(left[place], place)
        return np.asarray(found[place])

    _carry(weights, upper, PANEL, step)
    return found


def _carry(weights: Floats, upper: Floats, panel: int, step: Callable[[int, Floats], Floats]) -> None:
    """Round the inputs in order and let all later ones make up for the error of each.

    Args:
        weights: (f, o).
        upper: U, see `factor`.
        panel: number of inputs whose errors are applied to later ones at once.
        step: returns the rounded numbers of an input, from its number and all numbers as changed so far.
    """
    left = np.array(weights, np.float64, order="C")
    inputs, outputs = left.shape
    for first in range(0, inputs, panel):
        end = min(first + panel, inputs)
        errors = np.empty((end - first, outputs))
        for place in range(first, end):
            error = (left[place] - step(place, left)) / upper[place, place]
            left[place + 1 : end] -= np.outer(upper[place, place + 1 : end], error)
            errors[place - first] = error
        left[end:] -= linear().product(np.ascontiguousarray(upper[first:end, end:].T), errors)


def squared_error(difference: Floats, gram: Floats) -> float:
    """Return the squared change of the products with the inputs if weights (f, o) change by `difference`."""
    return float(np.einsum("fo,fo->", difference, linear().product(gram, difference)))


def factor(gram: Floats) -> Floats | None:
    """Return U with UᵀU = A⁻¹ for the damped second moments A (f, f); None if no ridge makes them definite.

    With the order of the inputs turned around, A = L Lᵀ, and U is the inverse of L turned back.  Inputs that are always
    zero get the mean second moment.  A is in units of that mean, so that float32 has the range, and after damping its
    condition number is below f / `DAMPING`, so that float32 has the digits.
    """
    powers = np.diagonal(gram)[::-1]
    mean = float(powers.mean())
    if not mean > 0.0:
        return None
    for growth in range(GROWTHS + 1):
        damped = np.divide(gram[::-1, ::-1], mean, dtype=np.float32, casting="same_kind")
        np.fill_diagonal(damped, np.where(powers > 0, powers / mean + DAMPING * 10.0**growth, 1.0))
        try:
            factorize(damped)
        except np.linalg.LinAlgError:
            continue
        return np.ascontiguousarray(inverted(damped)[::-1, ::-1])
    return None
