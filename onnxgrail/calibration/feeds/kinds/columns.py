"""Columns of Arrow tables as inputs: numbers, lists of numbers, and the mask of lists of different lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxgrail.calibration.feeds.parts import Column, readable
from onnxgrail.calibration.feeds.reading import LENGTH, Reading
from onnxgrail.calibration.feeds.signature import Input
from onnxgrail.core import Array, Ints
from onnxgrail.errors import DataError
from onnxgrail.machine.extras import extra


def library() -> Any:
    """Return pyarrow.

    Raises:
        MissingExtraError: it is not installed.
    """
    return extra("pyarrow", "datasets", "saved data sets and tables need pyarrow")


def plain(kind: Any) -> Any:
    """Return the storage type of an extension type; other types unchanged."""
    return kind.storage_type if isinstance(kind, library().BaseExtensionType) else kind


def leaf_of(kind: Any) -> tuple[int, Any]:
    """Return the depth of nested lists and the type of their values."""
    types, depth, kind = library().types, 0, plain(kind)
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        depth, kind = depth + 1, plain(kind.value_type)
    return depth, kind


class Numbers(Column):
    """A column of numbers or of lists of numbers; lists of different lengths are padded.

    Attributes:
        pad: the number they are padded with.
    """

    pad = 0

    def __init__(self, column: Any, depth: int, leaf: Any, entry: Input | None, reading: Reading, source: str) -> None:
        self.column, self.source = column, source
        sizes = _sizes(column) if depth else np.zeros(0, np.int64)
        self.ragged = depth == 1 and len(sizes) > 0 and int(sizes.min()) != int(sizes.max())
        fixed = entry.shape[1] if entry is not None and entry.shape is not None and len(entry.shape) > 1 else None
        self.fixed = fixed if self.ragged and isinstance(fixed, int) else None
        longest = int(sizes.max()) if len(sizes) else 0
        self.length = self.fixed or min(longest, reading.sequence_length or max(LENGTH, longest))
        inner: tuple[int, ...] = ()
        if depth:
            inner = (self.length,) if self.ragged else self._inner(depth)
        dtype = library().array([], leaf).to_numpy(zero_copy_only=False).dtype  # its other ways may need pandas
        # Python's floats are saved as float64, and `datasets` returns them as float32, too.
        self.rounded = dtype == np.float64 and entry is not None and entry.dtype == np.float32
        super().__init__((len(column), *inner), np.dtype(np.float32) if self.rounded else dtype)

    def _inner(self, depth: int) -> tuple[int, ...]:
        with readable(self.source):
            shape: tuple[int, ...] = np.asarray(self.column[0].as_py()).shape
        if len(shape) != depth:
            raise DataError(f"{self.source}: lists of different lengths", hint="Save rows of one shape")
        return shape

    def rows(self, numbers: Ints) -> Array:
        """Return the values of these rows."""
        taken = self._taken(numbers)
        sizes = _sizes(taken) if self.ragged else None
        while hasattr(taken, "flatten") and leaf_of(taken.type)[0]:
            taken = taken.flatten()
        if taken.null_count:
            raise DataError(f"{self.source}: values are missing", hint="Remove those rows")
        with readable(self.source):
            values = taken.to_numpy(zero_copy_only=False).astype(self.dtype, copy=False)
            if sizes is None:
                return np.asarray(values.reshape(len(numbers), *self.shape[1:]))
        longest = self.fixed or min(int(sizes.max(initial=0)), self.length)
        table, start = np.full((len(numbers), longest), self.pad, self.dtype), 0
        for row, size in enumerate(sizes):
            table[row, : min(size, longest)] = values[start : start + min(size, longest)]
            start += size
        return table

    def lengths(self, numbers: Ints) -> Ints:
        """Return the number of values in each of these rows."""
        return _sizes(self._taken(numbers))

    def _taken(self, numbers: Ints) -> Any:
        taken = self.column.take(library().array(numbers)).combine_chunks()
        return taken.storage if isinstance(taken, library().ExtensionArray) else taken


class Lengths(Column):
    """The mask of rows of different lengths."""

    def __init__(self, values: Numbers, entry: Input) -> None:
        self.values = values
        super().__init__(values.shape[:2], entry.dtype)

    def rows(self, numbers: Ints) -> Array:
        """Return 1 for values and 0 for padding."""
        width = self.values.rows(numbers).shape[1]
        return (np.arange(width) < self.values.lengths(numbers)[:, None]).astype(self.dtype)


def _sizes(column: Any) -> Ints:
    """Return the lengths of a column's lists, without reading their values."""
    from pyarrow import compute

    return np.asarray(compute.list_value_length(column).fill_null(0).to_numpy())
