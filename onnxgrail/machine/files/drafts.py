"""Drafts: folders for files that a run later moves to their place, or needs only while it works.

A run holds a lock on each of its drafts. The system releases the lock when the process ends, however it ends, so
a draft that can be locked belongs to no living run, and a later run removes it. Locks are visible only to processes on
the same kernel, which the name of a draft therefore states; drafts of other kernels are not touched.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

HIDDEN, SCRATCH = ".onnxgrail-", "onnxgrail-"  # prefixes: next to results, and in the folder for temporary files
FILES = "files"
BOOT = Path("/proc/sys/kernel/random/boot_id")
RANDOM = "[a-z0-9_]{8}"  # what tempfile appends to a prefix


@contextlib.contextmanager
def draft(place: Path, prefix: str = HIDDEN) -> Iterator[Path]:
    """Create a folder that is removed at the end.

    Raises:
        OSError: it cannot be created.
    """
    folder, handle = _made(place, prefix)
    try:
        files = folder / FILES  # not the locked folder itself: placing a model there would wait for that lock
        files.mkdir()
        yield files
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def clear(place: Path, prefix: str = HIDDEN) -> None:
    """Remove the drafts in a folder whose processes have ended."""
    kernel = _kernel()
    if not kernel:
        return
    named = re.compile(f"{re.escape(prefix)}{kernel}-{RANDOM}")
    with contextlib.suppress(OSError):
        for folder in [path for path in place.iterdir() if named.fullmatch(path.name)]:
            handle = locked(folder, wait=False)
            if handle is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(handle)


def _made(place: Path, prefix: str) -> tuple[Path, int | None]:
    """Return a new folder and the handle of its lock, None if there are no locks."""
    kernel = _kernel()
    while kernel:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{kernel}-", dir=place))
        handle = locked(folder, wait=True)
        if handle is not None:
            return folder, handle
        try:
            folder.rmdir()
        except FileNotFoundError:  # another run removed it before it was locked
            continue
        break
    return Path(tempfile.mkdtemp(prefix=prefix, dir=place)), None


def locked(folder: Path, *, wait: bool) -> int | None:
    """Return a handle that holds the lock of a folder; None if it cannot be locked, or if the folder is gone."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.path.samestat(os.fstat(handle), folder.stat()):
            return handle
    except OSError:  # held by a living run, a file system without locks, or the folder is gone
        pass
    os.close(handle)
    return None


@functools.cache
def _kernel() -> str:
    """Return a short identifier of the running kernel since its boot; empty if the system has none."""
    try:
        return hashlib.sha256(BOOT.read_bytes()).hexdigest()[:8]
    except OSError:
        return ""
