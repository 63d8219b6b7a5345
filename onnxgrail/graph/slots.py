"""Read and write a block's channels in one array: converts axes and positions to (u, m, r) and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from onnxgrail.core import Array, Floats, Ints, Slot


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return True if a dtype is a float, including those of `ml_dtypes`, which numpy does not know as floats."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def largest(dtype: np.dtype[Any]) -> float:
    """Return the largest finite number of a float dtype; infinity for other dtypes."""
    if not is_float(dtype):
        return float("inf")
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def clamped(values: Floats, dtype: np.dtype[Any]) -> Array:
    """Convert values to a dtype; those beyond its range become its largest finite numbers."""
    limit = largest(dtype)
    return np.clip(values, -limit, limit).astype(dtype)


def read(array: Array, slot: Slot) -> Floats:
    """Return the slot's channels as float64.

    Args:
        array: the weight or activation.
        slot: its channel axis and the positions of u units, (u, m).

    Returns:
        (u, m, r), where r are all other axes flattened.
    """
    front = np.moveaxis(array, slot.axis, 0)
    positions = slot.index.ravel()
    if not np.array_equal(positions, np.arange(len(front))):  # otherwise there is nothing to gather
        front = front[positions]
    return front.reshape(*slot.index.shape, -1).astype(np.float64, order="C")


def write(array: Array, slot: Slot, units: Ints, values: Floats) -> Array:
    """Return a copy of `array` with new values for some channels; other positions keep their values.

    Args:
        array: the weight.
        slot: its channel axis and the positions of all units.
        units: (k,) units to overwrite.
        values: (k, m, r) new values; those beyond the range of the array's dtype are clamped.
    """
    out = array.copy()
    front = np.moveaxis(out, slot.axis, 0)
    positions = slot.index[units]
    front[positions] = clamped(values, array.dtype).reshape(*positions.shape, *front.shape[1:])
    return out
