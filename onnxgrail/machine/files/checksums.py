"""Checksums of files, on disk or while they are written."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, BinaryIO


class Hashed:
    """An open file that computes the checksum of what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest = file, hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> None:
        """Write bytes, or an array of bytes."""
        self._digest.update(data)
        self.size += self._file.write(data)

    @property
    def digest(self) -> str:
        """Return the checksum in hexadecimal."""
        return self._digest.hexdigest()


def sha256(path: Path) -> str:
    """Return the checksum of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
