"""Move a finished model to its place: first its weights, named after their checksum, then the graph.

The graph refers to its weights by that name, so the rename of the graph alone switches from the old model to the new
one: a run that is killed before that leaves the old graph with the old weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from onnxgrail.machine.files.drafts import locked
from onnxgrail.machine.files.paths import sync


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


DIGITS = (16, 32, 64)  # of a checksum in a file name; more only if another file has the shorter name
SEARCHED = 2**32  # bytes of other files that are searched for a file's name before it is removed
PIECE = 2**24
PLAIN = frozenset({".json", ".html", ".htm", ".yaml", ".yml", ".md", ".txt", ".log"})  # reports name what was written


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A file with the weights of a model, not moved to its place yet.

    Attributes:
        path: its current path.
        name: its final name, to which the model refers.
        sha256: its checksum.
    """

    path: Path
    name: str
    sha256: str


def weights_name(target: Path, digest: str) -> str:
    """Return the name of the weights file of `target`; `digest` is the checksum of the weights."""
    names = [f"{target.name}.{digest[:count]}.data" for count in DIGITS]
    free = (n for n in names if not os.path.lexists(target.parent / n) or _holds(target.parent / n, digest))
    return next(free, names[-1])


def place(target: Path, graph: Path, weights: Weights | None = None) -> None:
    """Move a model to its place, and remove weights files that were written for the same target before.

    Args:
        target: final path of the graph.
        graph: the model file, on the same file system.
        weights: the weights file to which the graph refers, None if there is none.

    Raises:
        OSError: a file cannot be moved.
    """
    with contextlib.ExitStack() as stack:
        handle = locked(target.parent.resolve(), wait=True)  # against other runs that move files there, if possible
        if handle is not None:
            stack.callback(os.close, handle)
        if weights is not None:
            there = target.parent / weights.name
            sync(weights.path)
            if not there.is_file() or there.stat().st_size != weights.path.stat().st_size:
                weights.path.replace(there)
            sync(there)
            sync(target.parent)
        sync(graph)
        graph.replace(target)
        sync(target.parent)
        _tidy(target, None if weights is None else weights.name)


def _holds(path: Path, digest: str) -> bool:
    return path.is_file() and sha256(path) == digest


def _tidy(target: Path, current: str | None) -> None:
    """Remove weights files of earlier models at `target`, and of killed runs, unless another file refers to them.

    Models refer to their weights by a path relative to their own folder, never upwards.
    """
    named = re.compile(re.escape(target.name) + rf"\.[0-9a-f]{{{DIGITS[0]},{DIGITS[-1]}}}\.data")
    with contextlib.suppress(OSError, RuntimeError):
        here = [file for file in target.parent.iterdir() if file.name not in (target.name, current)]
        old = {file.name for file in here if named.fullmatch(file.name) and not file.is_symlink()}
        if old:
            above = [file for folder in target.absolute().parents[1:] for file in folder.glob("*.onnx")]
            for name in old - _mentioned(old, [file for file in here if file.name not in old] + above):
                (target.parent / name).unlink()


def _mentioned(names: set[str], files: Iterable[Path]) -> set[str]:
    """Return the names that a file contains or a link leads to; all names if too much would have to be read."""
    found, room = set[str](), SEARCHED
    longest = max(len(name.encode()) for name in names)
    for file in files:
        if file.is_symlink():
            found |= names & {file.resolve().name}
        if not file.is_file() or file.suffix.lower() in PLAIN:
            continue
        room -= file.stat().st_size
        if room < 0:
            return names
        with file.open("rb") as source:
            rest = b""
            while piece := source.read(PIECE):
                found |= {name for name in names if name.encode() in rest + piece}
                rest = piece[-longest:]
    return found
