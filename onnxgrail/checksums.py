"""Checksums of files: of those that are read in threads while other work goes on, of others while they are written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from io import FileIO
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

PIECE = 2**24  # bytes of a file that are looked at together


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


class Hashed:
    """An open file to which one writes, and the checksum of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> None:
        """Write bytes, or an array of them."""
        self._digest.update(data)
        self.size += self._file.write(data)

    @property
    def digest(self) -> str:
        """The checksum in hexadecimal."""
        return self._digest.hexdigest()


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
