"""Outputs that are lists: the number of rows depends on the values of the inputs, as after non-maximum suppression.

Two models may list different numbers of detections for the same sample. A row that one model lacks counts as a row of
zeros, and an empty list as one such row, so that every sample can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxgrail.core import Array, Feed

LISTED = "a list whose length differs between samples"
WRITTEN = "a list of distributions, whose length differs between samples"
NEAR = 1e-3  # tolerance of a sum of probabilities


def open_axes(shapes: Mapping[str, Sequence[Any]]) -> dict[str, tuple[int, ...]]:
    """Return the axes of each output along which its size is open.

    Args:
        shapes: declared shape by output name; open sizes are not numbers.
    """
    found = {
        name: tuple(axis for axis, size in enumerate(shape) if not isinstance(size, int))
        for name, shape in shapes.items()
    }
    return {name: axes for name, axes in found.items() if axes}


def lists_of(outputs: Iterable[Any]) -> Lists:
    """Return what finds the lists among the outputs of a graph."""
    shapes = {value.name or "": tuple(value.shape) for value in outputs if value.shape is not None}
    return Lists(open_axes(shapes), set())


def written(arrays: Sequence[Array]) -> bool:
    """Return True if the rows of a list are distributions, as of the symbols that a loop writes one by one.

    Args:
        arrays: values of a list, each (samples, ..., columns); rows that a model lacks are zeros.
    """
    if any(array.ndim < 3 or array.shape[-1] < 2 or array.min(initial=0) < 0 for array in arrays):
        return False
    sums = np.concatenate([array.sum(axis=-1, dtype=np.float64).ravel() for array in arrays])
    return bool(sums.any() and ((abs(sums - 1) < NEAR) | (sums == 0)).all())


class Lists:
    """Finds the outputs that are lists: feeds of the same shapes have given them different lengths, or none.

    Attributes:
        names: of the lists that were found so far.
    """

    def __init__(self, axes: Mapping[str, tuple[int, ...]], names: set[str]) -> None:
        """Start with the open axes of each output, and a set to which names are added."""
        self.names = names
        self._axes = axes
        self._seen: dict[tuple[str, tuple[tuple[int, ...], ...]], tuple[int, ...]] = {}

    @property
    def growing(self) -> frozenset[str]:
        """Return the outputs whose first axis is open: with a single sample, they may be lists without samples."""
        return frozenset(name for name, axes in self._axes.items() if 0 in axes)

    def leveled(self, feed: Feed, wanted: Feed, got: Feed) -> tuple[Feed, Feed]:
        """Return the outputs of two models for a feed, with lists of the same length, at least one row.

        Args:
            feed: inputs of both.
            wanted: outputs of the reference.
            got: outputs of the other model.
        """
        one, two = dict(wanted), dict(got)
        shapes = tuple(np.shape(array) for array in feed.values())
        for name, along in self._axes.items():
            a, b = wanted.get(name), got.get(name)
            if a is None or b is None or not (_numbers(a) and _numbers(b) and a.ndim == b.ndim):
                continue
            ours, theirs = (tuple(v.shape[axis] for axis in along if axis < v.ndim) for v in (a, b))
            if 0 in ours or not ours == theirs == self._seen.setdefault((name, shapes), ours):
                self.names.add(name)
            sizes = {axis: max(pair[0], pair[1], 1) for axis, *pair in zip(along, ours, theirs, strict=False)}
            one[name], two[name] = _padded(a, sizes), _padded(b, sizes)
        return one, two


def _numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "iuf"


def _padded(array: Array, sizes: Mapping[int, int]) -> Array:
    """Return an array with rows added at the end of some axes: zeros, or for integers a number that no row holds."""
    missing = [(0, max(0, sizes.get(axis, 0) - size)) for axis, size in enumerate(array.shape)]
    if not any(after for _, after in missing):
        return array
    kind = array.dtype.kind
    nothing = 0 if kind == "f" else np.iinfo(array.dtype).min if kind == "i" else np.iinfo(array.dtype).max
    return np.pad(array, missing, constant_values=nothing)
