"""Matrices for fitting a consumer: its inputs and outputs, one row per sampled output position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from onnxgrail.core import Array, Ints
from onnxgrail.graph.fittable.consumers import Window

Where = Ints | slice
"""Flat positions of an output, sample-major. The full slice stands for all positions and avoids a copy."""

ALL = slice(None)


def positions(shape: tuple[int, ...], made: int, wanted: int, rng: np.random.Generator) -> Where:
    """Return the sampled positions of an output: all of them, or `wanted` random positions without replacement.

    Args:
        shape: shape of the output.
        made: its channel axis.
        wanted: maximum number of positions.
        rng: random generator.
    """
    total = _count(shape, made)
    return ALL if total <= wanted else np.sort(rng.choice(total, wanted, replace=False))


def numbers(where: Where, shape: tuple[int, ...], made: int) -> Ints:
    """Return the positions as an index array (rows,).

    Args:
        where: flat positions.
        shape: shape of the output.
        made: its channel axis.
    """
    return np.arange(_count(shape, made))[where]


def _count(shape: tuple[int, ...], made: int) -> int:
    return int(np.prod([s for a, s in enumerate(shape) if a != made]))


def outputs(array: Array, made: int, where: Where) -> Array:
    """Return an activation's values (rows, channels) at flat positions.

    Args:
        array: the activation.
        made: its channel axis.
        where: flat positions.
    """
    return np.moveaxis(array, made, -1).reshape(-1, array.shape[made])[where]


def patches(array: Array, window: Window, out_shape: tuple[int, ...], where: Where) -> Array:
    """Return the inputs of a convolution (rows, channels times taps) for the flat positions of its output.

    Args:
        array: the input of the convolution.
        window: its kernel, strides and padding.
        out_shape: shape of its output.
        where: flat positions of its output.
    """
    spatial = out_shape[2:]
    index = np.unravel_index(numbers(where, out_shape, 1), (out_shape[0], *spatial))
    taken = np.moveaxis(windows(array, window), 1, 1 + len(spatial))[index]  # rows first, then channels and taps
    return taken.reshape(len(taken), -1)


def places(sizes: Sequence[int], window: Window) -> tuple[int, ...]:
    """Return the spatial sizes of a convolution's output; `sizes` are those of its input."""
    axes = zip(sizes, window.sides(sizes), window.reach, window.strides, strict=True)
    return tuple((size + sum(sides) - reach) // stride + 1 for size, sides, reach, stride in axes)


def windows(array: Array, window: Window) -> Array:
    """Return every window of a convolution as a view (n, c, *output, *kernel) of the padded input."""
    dims = len(window.kernel)
    padded = np.pad(array, [(0, 0), (0, 0), *window.sides(array.shape[2:])])
    view = sliding_window_view(padded, window.reach, axis=tuple(range(2, 2 + dims)))
    steps = [slice(None), slice(None)]
    steps += [slice(None, None, s) for s in window.strides]
    steps += [slice(None, None, d) for d in window.dilations]
    return view[tuple(steps)]
