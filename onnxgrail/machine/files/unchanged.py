"""Files that must not change while a command uses them."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from onnxgrail.errors import OnnxGrailError

PIECE = 2**20  # bytes that are yielded at once
LONGEST = 2**28  # bytes per system call, which an interrupt has to wait for


class SteadyFile:
    """A file that is read repeatedly.  Each access checks that it has not changed since it was opened.

    It is read and never mapped: a mapped file that is truncated ends the process with SIGBUS.

    Attributes:
        path: its path.
    """

    def __init__(self, path: Path, error: type[OnnxGrailError], *, held: bool = False) -> None:
        """Record the current state of the file.

        Args:
            path: of the file.
            error: exception type to raise when it has changed.
            held: keep the file open, so that it can be read after its name is gone.

        Raises:
            OSError: it cannot be read.
        """
        self.path, self._error = path, error
        self._handle = path.open("rb", buffering=0) if held else None
        if self._handle is not None:
            weakref.finalize(self, self._handle.close)
        self._lock = threading.Lock()
        self._stamp = _stamp(path.stat() if self._handle is None else os.fstat(self._handle.fileno()))

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self._stamp[0]

    def check(self) -> None:
        """Check that the file at this path is the one that was opened, and that it has not changed.

        Raises:
            OnnxGrailError: it has changed.
        """
        try:
            now = self.path.stat()
        except OSError as error:
            raise self._changed(f"it cannot be found: {error.strerror}") from error
        self._compare(now)

    def read_into(self, offset: int, room: memoryview) -> None:
        """Fill a buffer with bytes of the file.

        Raises:
            OnnxGrailError: the file has changed.
        """
        done = 0
        with self._opened() as source:
            self._compare(os.fstat(source.fileno()))
            source.seek(offset)
            while done < len(room):
                count = source.readinto(room[done : done + LONGEST])
                if not count:
                    raise self._changed(f"it ends at byte {offset + done}")
                done += count
            self._compare(os.fstat(source.fileno()))

    def pieces(self, offset: int, size: int) -> Iterator[memoryview]:
        """Yield `size` bytes from `offset` on in pieces, all in the same buffer.

        Raises:
            OnnxGrailError: the file has changed.
        """
        room = memoryview(bytearray(min(size, PIECE)))
        for start in range(0, size, PIECE):
            piece = room[: min(size - start, PIECE)]
            self.read_into(offset + start, piece)
            yield piece

    @contextlib.contextmanager
    def _opened(self) -> Iterator[FileIO]:
        if self._handle is None:
            try:
                source = self.path.open("rb", buffering=0)
            except OSError as error:
                raise self._changed(f"it cannot be read: {error.strerror}") from error
            with source:
                yield source
        else:
            with self._lock:
                yield self._handle

    def _compare(self, now: os.stat_result) -> None:
        if _stamp(now) != self._stamp:
            sizes = f"{self._stamp[0]} bytes, now {now.st_size}"
            raise self._changed(sizes if now.st_size != self._stamp[0] else "it was written again")

    def _changed(self, why: str) -> OnnxGrailError:
        hint = "Repeat the command when nothing writes to it"
        return self._error(f"{str(self.path)!r} changed while it was used ({why})", hint=hint)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    """Return the attributes of a file that change when it is written or replaced."""
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev
