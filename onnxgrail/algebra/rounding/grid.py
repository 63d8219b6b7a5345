"""Grids of a few bits per number, with a scale and a zero point for each block of inputs of each output."""

from __future__ import annotations

import numpy as np

from onnxgrail.core import Array, Floats, Grid, Rounded

TOGETHER = 8192  # outputs that are rounded at once
SHRINKS = np.linspace(1.15, 0.55, 25).tolist()  # factors of the range that the search of a scale tries
TINY, HUGE = 1e-12, 1e15  # largest numbers between which float32 holds their squared errors, in a third of the time
STEPS = (0, -1, 1, -1, 1)  # of the zero point, each with a least-squares fit of the scale to the codes


def coded(numbers: Floats, scale: Floats, zero: Floats, grid: Grid) -> Floats:
    """Return the codes of numbers, as floats."""
    return np.clip(np.rint(numbers / scale + zero), 0, grid.high)


def searched(block: Floats, importance: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """Find the scale and zero point of each column with the smallest weighted squared error.

    Ranges narrower and wider than that of the numbers are tried, with both signs of the scale, since the codes of a
    symmetric grid reach further below zero than above it. The scale is then fitted to the codes of the best range, and
    of the zero points beside it.

    Args:
        block: (s, n) numbers that share a scale along the first axis.
        importance: (s,) positive weights of the squared errors.
        grid: the form.

    Returns:
        Scales (n,), never 0 and equal to numbers of the dtype of the grid, and zero points (n,).
    """
    kind = np.float32 if TINY < np.abs(block).max(initial=0.0) < HUGE else np.float64
    block, importance = block.astype(kind), (importance / importance.max()).astype(kind)
    best, scale, zero = (np.full_like(block[0], number) for number in (np.inf, 1.0, grid.middle))
    for trial in _ranges(block, grid):
        best = _better(block, importance, grid, trial, (best, scale, zero))
    for step in STEPS if not grid.symmetric else (0, 0):
        moved = np.clip(zero + step, 0, grid.high)
        levels = coded(block, scale, moved, grid) - moved
        power = importance @ np.square(levels)
        fitted = (importance @ (levels * block)) / np.where(power > 0, power, 1.0)
        best = _better(block, importance, grid, (fitted, moved), (best, scale, zero))
    return scale.astype(np.float64), zero.astype(np.float64)


def _ranges(block: Floats, grid: Grid) -> list[tuple[Floats, Floats]]:
    """Return scales and zero points to try, (n,) each."""
    if grid.symmetric:
        end = np.take_along_axis(block, np.abs(block).argmax(axis=0)[None], axis=0)[0]
        middle = np.full_like(end, grid.middle)
        return [(sign * shrink * end / grid.middle, middle) for shrink in SHRINKS for sign in (-1, 1)]
    low, high = np.minimum(block.min(axis=0), 0.0), np.maximum(block.max(axis=0), 0.0)
    scales = [shrink * (high - low) / grid.high for shrink in SHRINKS]
    return [
        (s, np.clip(np.rint(-low * shrink / _safe(s)), 0, grid.high)) for s, shrink in zip(scales, SHRINKS, strict=True)
    ]


def _better(
    block: Floats,
    importance: Floats,
    grid: Grid,
    trial: tuple[Floats, Floats],
    found: tuple[Floats, Floats, Floats],
) -> Floats:
    """Write scales and zero points that lower the error into `found`; return the errors."""
    best, scale, zero = found
    fresh = _safe(_stored(trial[0], grid))
    error = importance @ np.square(block - (coded(block, fresh, trial[1], grid) - trial[1]) * fresh)
    wins = (error < best) & (_stored(trial[0], grid) != 0)
    scale[wins], zero[wins] = fresh[wins], trial[1][wins]
    return np.where(wins, error, best)


def _stored(scale: Floats, grid: Grid) -> Floats:
    """Return scales as the file holds them."""
    limit = float(np.finfo(grid.dtype).max)
    return np.clip(scale, -limit, limit).astype(grid.dtype).astype(scale.dtype)


def _safe(scale: Floats) -> Floats:
    return np.where(scale == 0, 1.0, scale)


def nearest(weights: Array, grid: Grid) -> Rounded:
    """Round a matrix (inputs, outputs) number by number, with scales by search.

    Args:
        weights: the matrix, in any float type; a part of its outputs at a time is converted to float64.
        grid: the form.
    """
    inputs, outputs = weights.shape
    codes = np.empty((inputs, outputs), np.uint8)
    scales = np.empty((grid.blocks(inputs), outputs), grid.dtype)
    zeros = np.empty(scales.shape, np.uint8)
    for number, first in enumerate(range(0, inputs, grid.size)):
        rows = slice(first, first + grid.size)
        for begin in range(0, outputs, TOGETHER):
            some = slice(begin, begin + TOGETHER)
            block = np.asarray(weights[rows, some], np.float64)
            scale, zero = searched(block, np.ones(len(block)), grid)
            codes[rows, some] = coded(block, scale, zero, grid)
            scales[number, some], zeros[number, some] = scale, zero
    return Rounded(codes, scales, zeros, grid)
