"""Output paths: checked before the work starts, never over an input file, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from onnxgrail.errors import ModelError, OutputError, UsageError
from onnxgrail.machine.files.drafts import clear, draft

NO_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM, errno.ENOSYS, errno.EISDIR})

DEVICES = Path("/dev")


def default_output(source: Path, word: str = "compressed") -> Path:
    """Return `model.compressed.onnx`, or with another word, next to `model.onnx`."""
    return source.with_name(f"{source.stem}.{word}{source.suffix or '.onnx'}")


def path_of(source: object) -> Path | None:
    """Return the path of a model, None if the model is not a file."""
    return Path(source) if isinstance(source, str | os.PathLike) else None


def check_input(source: Path, hint: str = "Give an .onnx file") -> None:
    """Check that a file can be read.

    Raises:
        ModelError: the file does not exist, is a folder, or is not readable.
    """
    if source.is_dir():
        raise ModelError(f"{str(source)!r} is a folder", hint=hint)
    if not source.exists():
        raise ModelError(f"no file {str(source)!r}", hint=hint)
    if not os.access(source, os.R_OK):
        raise ModelError(f"{str(source)!r} cannot be read", hint="Check its permissions")


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """A file that a command reads, or a folder of such files.

    Attributes:
        path: the file or folder.
        what: its name in messages.
        holds: returns True for a path relative to the folder if that file is among the files that are read.
    """

    path: Path
    what: str
    holds: Callable[[Path], bool] = lambda _: True


Targets = Iterable[tuple[str, Path]]
"""Pairs of an option and the file that it writes."""


def check_targets(targets: Targets, reads: Iterable[Read], folders: Targets = ()) -> None:
    """Refuse to write over a file that is read, and to write two outputs to one file.

    Links are followed, and all hard links of a file count as that file.

    Args:
        targets: files to write.
        reads: files to read; no option allows to replace them.
        folders: folders that belong to the command.

    Raises:
        OutputError: a target is read, or such a folder contains a file that is read.
        UsageError: two targets are one file.
    """
    reads, seen = list(reads), list[tuple[str, Path]]()
    hint = "What is read is never replaced, with --force either: choose another name"
    for option, folder in folders:
        for read in reads:
            if _real(read.path).is_relative_to(_real(folder)):
                raise OutputError(f"{option} {str(folder)!r} holds {read.what} {str(read.path)!r}", hint=hint)
    for option, target in targets:
        for read in reads:
            if _same(read.path, target):
                raise OutputError(f"{option} {str(target)!r} is {read.what}", hint=hint)
            if read.path.is_dir() and _among(target, read):
                raise OutputError(f"{option} {str(target)!r} belongs to {read.what} {str(read.path)!r}", hint=hint)
        for other, place in seen:
            if _same(place, target):
                raise UsageError(f"{option} {str(target)!r} is the file of {other}", hint="Choose another name")
        seen.append((option, target))


def _among(target: Path, read: Read) -> bool:
    """Return True if a target is one of the files that are read from a folder, now or the next time."""
    place, folder = _real(target), _real(read.path)
    if place.is_relative_to(folder) and read.holds(place.relative_to(folder)):
        return True
    if not target.exists():
        return False
    found = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return any(_same(file, target) for file in found if read.holds(file.relative_to(folder)))


def _same(one: Path, two: Path) -> bool:
    try:
        return one.samefile(two)
    except (OSError, ValueError):  # one file is missing, or has an impossible name
        return _real(one) == _real(two)


def _real(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # links that lead to themselves, impossible names
        return path.absolute()


def check_output(target: Path, *, force: bool = False, what: str = "output") -> None:
    """Check that a file can be written, before the work is done.

    Raises:
        OutputError: target is a folder or a device, exists without `force`, or its folder cannot be created or written.
    """
    if str(target) == "-":  # many tools write to stdout then
        raise OutputError(f"{what} '-' is no file name", hint="Give a file name")
    if target.is_dir():
        raise OutputError(f"{what} {str(target)!r} is a folder", hint="Give a file name")
    stream = target.is_symlink() and _real(target.parent) == DEVICES  # /dev/stdout: the link would be replaced
    if target.exists() and (stream or not target.is_file()):
        raise OutputError(f"{what} {str(target)!r} is not a regular file", hint="Give a file name")
    if target.exists() and not force:
        raise OutputError(f"{what} {str(target)!r} exists", hint="Use --force to replace it")
    check_folder(target.parent)


def check_folder(folder: Path) -> None:
    """Check that files can be created in a folder, which may not exist yet.

    The check creates a temporary file, because permission bits do not tell about mounts and full quotas.

    Raises:
        OutputError: the folder, or the folder in which it would be created, is not a folder or not writable.
    """
    there = existing(folder)
    if not there.is_dir():
        raise OutputError(f"{str(there)!r} is not a folder", hint="Choose another output folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise OutputError(
            f"cannot write to folder {str(there)!r}: {why}", hint="Choose another output folder"
        ) from error


def existing(folder: Path) -> Path:
    """Return a folder, or the closest one above it that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))


def make_folder(folder: Path) -> None:
    """Create a folder and its parents.

    Raises:
        OutputError: it cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make folder {str(folder)!r}: {error.strerror or error}") from error
    check_folder(folder)


def write_text(target: Path, text: str) -> None:
    """Write a text file, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    write_whole(target, lambda file: file.write(text.encode("utf-8")))
    clear(target.parent)


def write_whole(target: Path, write: Callable[[BinaryIO], object], *, durable: bool = True) -> None:
    """Write a file through a draft, so that a reader never sees half of it.

    Args:
        target: the file.
        write: receives the open file.
        durable: make sure that the file is on the disk even after a loss of power.

    Raises:
        OutputError: the file cannot be written.
    """
    make_folder(target.parent)
    try:
        with contextlib.ExitStack() as stack:
            file, folder = _nameless(target.parent), None
            if file is None:
                folder = stack.enter_context(draft(target.parent))
                file = (folder / "file").open("wb")
            with file:
                write(file)
                file.flush()
                if durable:
                    _sync(file.fileno())
                if folder is None:  # only now, so that a run killed earlier leaves nothing
                    folder = stack.enter_context(draft(target.parent))
                    _name(file, folder / "file")
            (folder / "file").replace(target)
        if durable:
            sync(target.parent)
    except OSError as error:
        raise OutputError(f"cannot write {str(target)!r}: {error.strerror or error}") from error


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk, so that a loss of power cannot mix old and new files.

    Raises:
        OSError: it cannot be flushed.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno not in NO_SYNC:  # folders on Windows
            raise
        return
    try:
        _sync(handle)
    finally:
        os.close(handle)


def _sync(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:  # some file systems cannot flush
            raise


def _nameless(folder: Path) -> BinaryIO | None:
    """Open a file without a name, which disappears if the process is killed; None if the system cannot."""
    if not hasattr(os, "O_TMPFILE") or not Path("/proc/self/fd").exists():
        return None
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b")
    except OSError:  # not all file systems support it
        return None


def _name(file: BinaryIO, path: Path) -> None:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)  # with a folder's handle `link` follows the link in /proc
    try:
        os.link(f"/proc/self/fd/{file.fileno()}", path.name, dst_dir_fd=folder)
    finally:
        os.close(folder)
