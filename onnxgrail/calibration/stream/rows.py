"""Rows for fitting a consumer: what it reads, as a matrix with one row per output position that is looked at."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from onnxgrail.core import Array, Ints
from onnxgrail.graph.fittable.consumers import Consumer, Window

Where = Ints | slice
"""Flat positions of an output, sample-major; the slice of all of them where none is left out, which copies nothing."""

ALL = slice(None)


def positions(shape: tuple[int, ...], made: int, wanted: int, rng: np.random.Generator) -> Where:
    """Positions of an output that are looked at: all of them, or as many as wanted, drawn."""
    total = _count(shape, made)
    return ALL if total <= wanted else np.sort(rng.choice(total, wanted, replace=False))


def numbers(where: Where, shape: tuple[int, ...], made: int) -> Ints:
    """(rows,) the positions one by one."""
    return np.arange(_count(shape, made))[where]


def _count(shape: tuple[int, ...], made: int) -> int:
    return int(np.prod([s for a, s in enumerate(shape) if a != made]))


def outputs(array: Array, made: int, where: Where) -> Array:
    """(rows, channels) of an output at flat positions."""
    return np.moveaxis(array, made, -1).reshape(-1, array.shape[made])[where]


def inputs(array: Array, consumer: Consumer, out_shape: tuple[int, ...], where: Where) -> Array:
    """(rows, features) of what makes the output at flat positions: channels, or channels times the window's taps."""
    if consumer.window is None:
        return np.moveaxis(array, consumer.axis, -1).reshape(-1, array.shape[consumer.axis])[where]
    spatial = out_shape[2:]
    index = np.unravel_index(numbers(where, out_shape, 1), (out_shape[0], *spatial))
    patches = windows(array, consumer.window)
    taken = np.moveaxis(patches, 1, 1 + len(spatial))[index]  # rows first, then channels and taps
    return taken.reshape(len(taken), -1)


def windows(array: Array, window: Window) -> Array:
    """(n, c, *output, *kernel): every window of a convolution, as a view of the padded input."""
    dims = len(window.kernel)
    padded = np.pad(array, [(0, 0), (0, 0), *window.pads])
    reach = tuple((k - 1) * d + 1 for k, d in zip(window.kernel, window.dilations, strict=True))
    view = sliding_window_view(padded, reach, axis=tuple(range(2, 2 + dims)))
    steps = [slice(None), slice(None)]
    steps += [slice(None, None, s) for s in window.strides]
    steps += [slice(None, None, d) for d in window.dilations]
    return view[tuple(steps)]
