"""Outputs that are no arrays of numbers as such arrays, so that they have a distance, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxgrail.core import Array

NUMBERS = "biufV"
TEXT = "OUS"


def alike(wanted: Any, got: Any) -> tuple[Array, Array] | None:
    """Return two values of one output as arrays of numbers, None where they cannot be compared.

    Texts become numbers that are equal where the texts are.  Maps with the same keys in all samples, as ZipMap makes
    them, become a row of numbers per sample, in the order of their keys.
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
    """Return in words what an output holds that cannot be compared."""
    inner = value[0] if isinstance(value, Sequence) and len(value) else value
    if isinstance(inner, dict):
        return "maps with other keys in every sample"
    return "a sequence" if isinstance(value, list) else "no value" if value is None else "values that are no numbers"


def _array(value: Any) -> Array | None:
    """A tensor, or maps with the same keys as rows of a table."""
    if isinstance(value, np.ndarray | np.generic):  # a scalar may arrive as a numpy number
        return np.asarray(value)
    rows = [value] if isinstance(value, dict) else value
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        return None
    keys = sorted(rows[0])
    if not keys or any(len(row) != len(keys) or not all(key in row for key in keys) for row in rows):
        return None
    return np.array([[row[key] for key in keys] for row in rows])
