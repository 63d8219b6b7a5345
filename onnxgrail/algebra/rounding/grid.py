"""Grids of a few bits per number, with a scale and a zero point for each block of inputs of each output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxgrail.core import Array, Floats, Grid, Rounded

TOGETHER = 8192  # outputs that are rounded at once
AT_ONCE = 2**16  # numbers; scales of small blocks are tried together, which saves calls
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
    found = _, scale, zero = [np.full_like(block[0], number) for number in (np.inf, 1.0, grid.middle)]
    scales, zeros = _ranges(block, grid)
    at_once = max(1, AT_ONCE // block.size)
    for first in range(0, len(scales), at_once):
        some = slice(first, first + at_once)
        _better(block, importance, grid, (scales[some], zeros[some]), found)
    for step in STEPS if not grid.symmetric else (0, 0):
        moved = np.clip(zero + step, 0, grid.high)
        levels = coded(block, scale, moved, grid) - moved
        power = importance @ np.square(levels)
        fitted = (importance @ (levels * block)) / np.where(power > 0, power, 1.0)
        _better(block, importance, grid, (fitted[None], moved[None]), found)
    return scale.astype(np.float64), zero.astype(np.float64)


def _ranges(block: Floats, grid: Grid) -> tuple[Floats, Floats]:
    """Return scales and zero points to try, (trials, n) each."""
    shrinks = np.array(SHRINKS, block.dtype)[:, None]
    if grid.symmetric:
        end = np.take_along_axis(block, np.abs(block).argmax(axis=0)[None], axis=0)
        scales = np.repeat(shrinks, 2, axis=0) * end / grid.middle
        scales[::2] *= -1
        return scales, np.full_like(scales, grid.middle)
    low, high = np.minimum(block.min(axis=0), 0.0), np.maximum(block.max(axis=0), 0.0)
    scales = shrinks * (high - low) / grid.high
    return scales, np.clip(np.rint(-low * shrinks / _safe(scales)), 0, grid.high)


def _better(
    block: Floats,
    importance: Floats,
    grid: Grid,
    trials: tuple[Floats, Floats],
    found: Sequence[Floats],
) -> None:
    """Replace errors, scales and zero points (n,) of `found` by those of trials (t, n) with smaller errors."""
    best, scale, zero = found
    stored, zeros = _stored(trials[0], grid), trials[1]
    scales = _safe(stored)
    levels = coded(block, scales[:, None], zeros[:, None], grid) - zeros[:, None]
    errors = importance @ np.square(block - levels * scales[:, None])
    errors[stored == 0] = np.inf
    wins = np.flatnonzero(errors.min(axis=0) < best)
    least = errors[:, wins].argmin(axis=0)
    best[wins], scale[wins], zero[wins] = (array[least, wins] for array in (errors, scales, zeros))


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
