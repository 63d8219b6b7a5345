"""Where results go: checked before the work starts, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from io import FileIO
from pathlib import Path
from threading import Thread
from typing import BinaryIO

from onnxgrail.errors import ModelError, OutputError

FULL = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})
PIECE = 2**24  # bytes of a file that are looked at together
SCRATCH = "onnxgrail-"  # how folders for files on the way are called
TEMPORARY = "Set TMPDIR to a folder with room for temporary files"


def default_output(source: Path) -> Path:
    """`model.compressed.onnx` beside `model.onnx`."""
    return source.with_name(f"{source.stem}.compressed{source.suffix or '.onnx'}")


def weights_file(target: Path) -> Path:
    """The file beside a model that holds its weights, where they are not inside."""
    return target.with_name(f"{target.name}.data")


def path_of(source: object) -> Path | None:
    """Where a model lies; None for one that is not a file."""
    return Path(source) if isinstance(source, str | os.PathLike) else None


def check_input(source: Path, hint: str = "Give an .onnx file") -> None:
    """Whether there is a file to read; `hint` says what was wanted.

    Raises:
        ModelError: nothing there, a folder, or not readable.
    """
    if source.is_dir():
        raise ModelError(f"{str(source)!r} is a folder", hint=hint)
    if not source.exists():
        raise ModelError(f"no file {str(source)!r}", hint=hint)
    if not os.access(source, os.R_OK):
        raise ModelError(f"{str(source)!r} cannot be read", hint="Check its permissions")


def check_output(source: Path, target: Path, *, force: bool = False) -> None:
    """Whether the result can be written, found out before the work is done.

    Args:
        source: the model that is read; never written.
        target: the file to write.
        force: an existing target may be replaced.

    Raises:
        OutputError: target is the source, a folder, exists without `force`, or its folder is missing or not writable.
    """
    if _same(source, target):
        raise OutputError(f"output {str(target)!r} is the input", hint="Choose another name with --output")
    if target.is_dir():
        raise OutputError(f"output {str(target)!r} is a folder", hint="Give a file name")
    if target.exists() and not force:
        raise OutputError(f"output {str(target)!r} exists", hint="Use --force to replace it")
    check_folder(target.parent)


def check_folder(folder: Path) -> None:
    """Whether files can be made in a folder; tried, since permission bits do not tell about mounts and full quotas.

    Raises:
        OutputError: it is missing, no folder, or not writable.
    """
    if not folder.exists():
        raise OutputError(f"output folder {str(folder)!r} does not exist", hint="Create it or choose another")
    if not folder.is_dir():
        raise OutputError(f"{str(folder)!r} is not a folder", hint="Choose another output folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise OutputError(
            f"cannot write to folder {str(folder)!r}: {why}", hint="Choose another output folder"
        ) from error


def _same(source: Path, target: Path) -> bool:
    try:
        return source.samefile(target)
    except OSError:
        return source.resolve() == target.resolve()


def write_text(target: Path, text: str) -> None:
    """Write a text file, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    write_whole(target, lambda file: file.write(text.encode("utf-8")))


def write_whole(target: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file through a temporary neighbour, so that a reader never sees half of it.

    Raises:
        OutputError: the file cannot be written.
    """
    check_folder(target.parent)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with _nameless(target.parent) or temporary.open("wb") as file:
            write(file)
            file.flush()
            if not temporary.exists():
                _name(file, temporary)
        temporary.replace(target)
    except OSError as error:
        raise OutputError(f"cannot write {str(target)!r}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _nameless(folder: Path) -> BinaryIO | None:
    """A file without a name, of which a killed process leaves nothing; None where the system has none."""
    if not hasattr(os, "O_TMPFILE") or not Path("/proc/self/fd").exists():
        return None
    try:
        return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b")
    except OSError:  # not every file system knows them
        return None


def _name(file: BinaryIO, path: Path) -> None:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)  # with a folder's handle `link` follows the link in /proc
    try:
        os.link(f"/proc/self/fd/{file.fileno()}", path.name, dst_dir_fd=folder)
    finally:
        os.close(folder)


def out_of_room(error: BaseException | None) -> OSError | None:
    """What an error goes back to, where that is a disk or a quota that is full."""
    while error is not None:
        # numpy tells no number where it writes an array.
        if isinstance(error, OSError) and (error.errno in FULL or "problem writing" in str(error)):
            return error
        error = error.__cause__ or error.__context__
    return None


class Checksums:
    """Checksums of files, some of which are made in threads while other work goes on."""

    def __init__(self, *, threads: int) -> None:
        """With one thread in all, each is made when it is asked for."""
        self._alone = threads == 1
        self._begun: dict[Path, Future[str]] = {}

    def begin(self, *paths: Path) -> None:
        """Have the checksums of files made, one after the other."""
        if not self._alone:
            self._start({path: partial(sha256, path) for path in paths})

    def renamed(self, path: Path, later: Path) -> None:
        """Have the checksum of a file made that is going to be renamed."""
        if not self._alone and os.name != "nt":  # there, no file is renamed that somebody reads
            self._start({later: partial(_read, path.open("rb", buffering=0))})

    def _start(self, makers: dict[Path, Callable[[], str]]) -> None:
        futures: dict[Path, Future[str]] = {path: Future() for path in makers}
        self._begun |= futures
        todo = list(zip(futures.values(), makers.values(), strict=True))
        Thread(target=_answer, args=(todo,), daemon=True).start()  # nobody waits for it where the work fails

    def of(self, path: Path) -> str:
        """The checksum."""
        future = self._begun.get(path)
        return sha256(path) if future is None else future.result()


def _answer(todo: list[tuple[Future[str], Callable[[], str]]]) -> None:
    for future, make in todo:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001  raised where the checksum is asked for
            future.set_exception(error)


def sha256(path: Path) -> str:
    """Checksum of a file in hexadecimal."""
    return _read(path.open("rb", buffering=0))


def _read(file: FileIO) -> str:
    """Of an open file, in pieces: large ones, since between them a thread waits for its turn."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    with file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()
