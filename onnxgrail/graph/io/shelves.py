"""Arrays that wait in unnamed temporary files, several in each, because every open file takes a descriptor."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import weakref
from typing import IO, Any

import numpy as np

from onnxgrail.core import Array

SHELF = 2**20  # bytes; changed arrays from this size on are kept in a file
PLACES = 16  # arrays of the same size in a file
SHELVED = 400  # files at once
ALIGN = 64  # bytes; alignment of an array in its file

Raw = np.memmap[Any, Any]


class _Shelves:
    """Temporary files of arrays; a file is removed with the last of its arrays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: weakref.WeakValueDictionary[int, Raw] = weakref.WeakValueDictionary()
        self._last: tuple[IO[bytes], weakref.ref[Raw]] | None = None  # the file that may have room
        self._used = 0  # bytes of the last file

    def put(self, data: Array) -> Array | None:
        """Write bytes (n,) and return them as a memory map; None if there are too many files.

        Raises:
            OSError: there is no room.
        """
        with self._lock:
            last, raw = (None, None) if self._last is None else (self._last[0], self._last[1]())
            if last is None or raw is None or self._used + data.size > raw.size:
                if last is not None:
                    last.close()
                self._last, self._used = None, 0
                if len(self._files) >= SHELVED:
                    return None
                last, raw = _opened(data.size)
                self._files[id(raw)] = raw
                self._last = last, weakref.ref(raw)
            start = self._used
            _write(last, start, data)
            self._used += data.size + -data.size % ALIGN
            return raw[start : start + data.size]


def _opened(size: int) -> tuple[IO[bytes], Raw]:
    """Create a file with places for arrays of this size, or for one if that is too much; return it and its bytes.

    The file takes only as much of the disk as is written.

    Raises:
        OSError: there is no room.
    """
    for places in (PLACES, 1):
        file = tempfile.TemporaryFile(prefix="onnxgrail-", buffering=0)  # noqa: SIM115  closed with its bytes
        try:
            file.truncate(places * (size + -size % ALIGN))
            raw: Raw = np.memmap(file, dtype=np.uint8, mode="r")
        except OSError:
            file.close()
            if places == 1:
                raise
            continue
        weakref.finalize(raw, file.close)
        return file, raw
    raise AssertionError


def _write(file: IO[bytes], start: int, data: Array) -> None:
    """Write bytes at a position; the file is not buffered, so a call may write a part only."""
    file.seek(start)
    left = data.data
    while left:
        left = left[file.write(left) :]


_shelves = _Shelves()


def shelved(array: Array) -> Array:
    """Move a large array to an unnamed temporary file; return small arrays, and all if there is no room, unchanged."""
    if array.nbytes < SHELF:
        return array
    with contextlib.suppress(OSError):
        raw = _shelves.put(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        if raw is not None:
            return np.asarray(raw.view(array.dtype).reshape(array.shape))
    return array
