"""Read and write a block's channels inside one array: the only place that turns axes and positions into (u, m, r)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from onnxgrail.core import Array, Floats, Ints, Slot


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is a float, those of `ml_dtypes` (which numpy does not know as such) included."""
    return dtype.kind == "f" or dtype.name.startswith(("bfloat", "float"))


def largest(dtype: np.dtype[Any]) -> float:
    """The largest finite number of a float type; infinity for others."""
    if not is_float(dtype):
        return float("inf")
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def read(array: Array, slot: Slot) -> Floats:
    """The slot's channels as (u, m, r) float64, r being all other axes flattened."""
    front = np.moveaxis(array, slot.axis, 0)
    return front[slot.index].reshape(*slot.index.shape, -1).astype(np.float64)


def write(array: Array, slot: Slot, units: Ints, values: Floats) -> Array:
    """A copy of `array` with `values` (k, m, r) at the positions of `units` (k,); other positions keep their values.

    The result has the array's dtype; values beyond the range of a narrow float are clamped to it.
    """
    out = array.copy()
    front = np.moveaxis(out, slot.axis, 0)
    positions = slot.index[units]
    limit = largest(array.dtype)
    if np.isfinite(limit):
        values = np.clip(values, -limit, limit)
    front[positions] = values.reshape(*positions.shape, *front.shape[1:]).astype(array.dtype)
    return out
