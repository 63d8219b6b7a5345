"""Temporary files: their folder, and the error if it has no room."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from onnxgrail.errors import OutputError
from onnxgrail.machine.files.drafts import SCRATCH, clear, draft

TEMPORARY = "Set TMPDIR to a folder with room for temporary files"
FULL = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
BLOCK = 4096  # bytes


def temporary_folder() -> Path:
    """Return the folder for temporary files: the one that TMPDIR names, else the system's.

    Raises:
        OutputError: TMPDIR names a folder that cannot be written, or no folder can be.
    """
    named = os.environ.get("TMPDIR")
    try:
        if named:
            with tempfile.TemporaryFile(dir=named) as file:
                file.write(bytes(BLOCK))
                file.flush()
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise no_room(error, named) from error


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Create a folder for temporary files, and remove those of runs that were killed.

    Raises:
        OutputError: it cannot be created, or there is no room for a file.
    """
    place = temporary_folder()
    clear(place, SCRATCH)
    try:
        with draft(place, SCRATCH) as folder:
            yield folder
    except OSError as error:
        named = error.filename if isinstance(error.filename, str | bytes) else ""
        if not os.fsdecode(named).startswith(str(place / SCRATCH)) and out_of_room(error) is None:
            raise
        raise no_room(error) from error


@functools.cache
def lasting() -> Path:
    """Create a folder for temporary files that is removed when the process ends, or by a later run if it is killed.

    Raises:
        OutputError: no temporary file can be written.
        OSError: it cannot be created.
    """
    place = temporary_folder()
    clear(place, SCRATCH)
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(draft(place, SCRATCH))


def no_room(error: OSError, folder: str | None = None) -> OutputError:
    """Return the error for temporary files that cannot be written; `folder` defaults to the folder in use."""
    if folder is None:
        folder = tempfile.tempdir or "."
    return OutputError(f"cannot write temporary files to {folder!r}: {error.strerror or error}", hint=TEMPORARY)


def out_of_room(error: BaseException | None) -> OSError | None:
    """Return the disk-full or quota error that caused an error, None if there is no such cause."""
    while error is not None:
        # numpy sets no errno when it fails to write an array.
        if isinstance(error, OSError) and (error.errno in FULL or "problem writing" in str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None
