"""Standard streams that are closed, full, or whose reader went away do not decide how a command ends."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

NAME = "standard output"


def settle() -> None:
    """Open closed standard streams to nowhere, and let writing to the others not break a command.

    Otherwise the next file that is opened would take the place of a closed stream, and what libraries print would be
    written into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _steady(sys.stdout, 1)
    sys.stderr = _steady(sys.stderr, 2)


def _steady(stream: Any, number: int) -> Any:
    """Return a text stream over the same descriptor; one that is no plain file stays as it is."""
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(_Raw(number)), "utf-8", "backslashreplace", line_buffering=True)
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if type(raw) is not io.FileIO:  # a console of Windows, or what a test puts there
        return stream
    buffered: Any = _Raw(number) if buffer is raw else io.BufferedWriter(_Raw(number))  # python -u has no buffer
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    return io.TextIOWrapper(
        buffered, stream.encoding, errors, line_buffering=stream.line_buffering, write_through=stream.write_through
    )


class _Raw(io.FileIO):
    """A standard stream that is given up once it cannot be written.

    A reader that went away is no error: the files of the run and its exit code count.  Of stderr nobody could be told.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "wb", closefd=False)
        self._given_up = False

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Write some of the data.

        Raises:
            OSError: standard output cannot be written, the first time.
        """
        size = memoryview(data).nbytes
        if self._given_up or not size:  # click asks with nothing whether it may write, and takes no for an answer
            return size
        try:
            return super().write(data)
        except OSError as error:
            self._given_up = True
            if error.errno == errno.EPIPE or self.fileno() == 2:
                return size
            raise OSError(error.errno, error.strerror, NAME) from error
