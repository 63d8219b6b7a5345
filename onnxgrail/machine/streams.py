"""Keep commands working if standard streams are closed, full, or no longer read."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

NAME = "standard output"


def settle() -> None:
    """Open closed standard streams on the null device, and let failed writes to the others not break a command.

    Otherwise the next opened file would get the descriptor of a closed stream, and the output of libraries would be
    written into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _steady(sys.stdout, 1)
    sys.stderr = _steady(sys.stderr, 2)


def _steady(stream: Any, number: int) -> Any:
    """Return a text stream over the same descriptor; a stream that is not a plain file stays unchanged."""
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(_Raw(number)), "utf-8", "backslashreplace", line_buffering=True)
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if type(raw) is not io.FileIO:  # a Windows console, or the capture of a test
        return stream
    buffered: Any = _Raw(number) if buffer is raw else io.BufferedWriter(_Raw(number))  # python -u has no buffer
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    return io.TextIOWrapper(
        buffered, stream.encoding, errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )


class _Raw(io.FileIO):
    """A standard stream that discards its output after the first failed write.

    A closed reader is not an error: the files of the run and its exit code count.  A failure of stderr cannot be
    reported.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self._given_up = False

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Write all of the data, unless the descriptor does not block: a signal can end a write to a pipe early.

        Without a buffer (python -u), nobody would write the rest.

        Raises:
            OSError: standard output cannot be written, the first time.
        """
        view = memoryview(data).cast("B")
        size, done = view.nbytes, 0
        if self._given_up:
            return size
        try:
            while done < size:
                some = super().write(view[done:])
                if some is None:
                    return done or None
                done += some
        except OSError as error:
            self._given_up = True
            if error.errno == errno.EPIPE or self.fileno() == 2:
                return size
            raise OSError(error.errno, error.strerror, NAME) from error
        return done
