"""The output of the readers: arrays by input name, in memory, mapped, or computed when a batch needs its rows."""

from __future__ import annotations

import contextlib
import math
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.core import Array, Ints, Labels
from onnxgrail.errors import DataError, OnnxGrailError
from onnxgrail.machine.files.unchanged import SteadyFile

NUMPY = (".npy", ".npz")


class Column(ABC):
    """Samples of one input that are computed row by row, so that only one batch is in memory at a time.

    It replaces an array: it has a dtype, a shape whose first axis counts samples, and rows by number.  If rows differ
    in length, a batch is as long as its longest row and may be shorter than `shape` says.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, dtype

    @abstractmethod
    def rows(self, numbers: Ints) -> Array:
        """Return the samples with these numbers, in this order."""

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, numbers: Ints) -> Array:
        return self.rows(np.asarray(numbers))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.rows(np.arange(len(self))), dtype=dtype)


Rows = Array | Column


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """Arrays that belong together: the content of one file, or one ready feed.

    Attributes:
        source: name of the data in messages.
        arrays: one array per model input.
        ready: True if the arrays are one feed already, which is never cut into batches.
        notes: notes on data that were ignored or assumed while reading.
        labels: true classes of the samples; not an input of the model.
        files: memory-mapped files that the arrays are views of.
    """

    source: str
    arrays: Mapping[str, Rows]
    ready: bool = False
    notes: tuple[str, ...] = ()
    labels: Labels | None = None
    files: tuple[SteadyFile, ...] = ()

    def check(self) -> None:
        """Check that mapped files have not changed.

        Raises:
            DataError: a file has changed.
        """
        for file in self.files:
            file.check()


def natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key of file names in which numbers are compared as numbers."""
    return [(int(t), "") if t.isdigit() else (-1, t) for t in re.split(r"(\d+)", path.name)]


def _is_numpy(path: Path) -> bool:
    """Return True if a file begins as those of numpy do, pickles included."""
    with path.open("rb") as file:
        head = file.read(2)
    return head in (b"PK", b"\x93N") or head[:1] == b"\x80"


@contextlib.contextmanager
def readable(path: object) -> Iterator[None]:
    """Turn exceptions of numpy, zipfile, protobuf and optional libraries on a broken file into a `DataError`.

    Raises:
        DataError: the file cannot be read, or it is a device or a pipe, which might never end.
    """
    if isinstance(path, Path) and path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{str(path)!r} is a device or a pipe, expected a file")
    try:
        yield
    except OnnxGrailError:
        raise
    except ValueError as error:
        if isinstance(path, Path) and path.suffix.lower() in NUMPY and not _is_numpy(path):
            raise DataError(
                f"{str(path)!r} is no NumPy file", hint="Write it with numpy.save or numpy.savez"
            ) from error
        if any(word in str(error).lower() for word in ("pickle", "python objects")):
            hint = "Save plain arrays; pickled objects are never loaded"
            raise DataError(f"{str(path)!r} holds pickled objects", hint=hint) from error
        raise DataError(f"cannot read {str(path)!r}: {error}") from error
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {str(path)!r}: {error}") from error
    except Exception as error:  # protobuf, tokenizers and pillow raise types of their own
        raise DataError(f"cannot read {str(path)!r}: {type(error).__name__}: {error}") from error


def content(array: Array) -> bytes:
    """Return the values of an array for a checksum."""
    return repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
