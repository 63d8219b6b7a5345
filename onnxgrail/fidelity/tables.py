"""Converts outputs that are not numeric arrays (texts, maps) to such arrays, so that they can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrail.core import Array

NUMBERS = "biufV"
TEXT = "OUS"


def alike(wanted: Any, got: Any) -> tuple[Array, Array] | None:
    """Return two values of one output as numeric arrays, None if they cannot be compared.

    Texts become codes that are equal for equal texts. Maps with the same keys in all samples, as ZipMap creates them,
    become a row of numbers per sample, in the order of their keys.
    """
    a, b = _array(wanted), _array(got)
    if a is None or b is None:
        return None
    if a.dtype.kind in NUMBERS and b.dtype.kind in NUMBERS:
        return a, b
    if a.dtype.kind in TEXT and b.dtype.kind in TEXT:
        _, codes = np.unique(np.concatenate([a.ravel(), b.ravel()]).astype(str), return_inverse=True)
        return codes[: a.size].reshape(a.shape), codes[a.size :].reshape(b.shape)
    return None


def kind_of(value: Any) -> str:
    """Describe the content of an output that cannot be compared."""
    inner = value[0] if isinstance(value, Sequence) and len(value) else value
    if isinstance(inner, dict):
        return "maps with other keys in every sample"
    return "a sequence" if isinstance(value, list) else "no value" if value is None else "values that are no numbers"


def _array(value: Any) -> Array | None:
    """Return a tensor, or the table of maps with equal keys."""
    if isinstance(value, np.ndarray | np.generic):  # a scalar may arrive as a numpy number
        return np.asarray(value)
    rows = [value] if isinstance(value, dict) else value
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        return None
    keys = sorted(rows[0])
    if not keys or any(len(row) != len(keys) or not all(key in row for key in keys) for row in rows):
        return None
    return np.array([[row[key] for key in keys] for row in rows])
