"""Put a finished model in its place: its weights first, under a name that their content gives, then the graph.

The graph refers to its weights by that name, so the one rename of the graph decides which model is there: whoever is
killed before it leaves the old graph with the old weights.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onnxgrail.machine.files.checksums import sha256
from onnxgrail.machine.files.paths import sync

DIGITS = (16, 32, 64)  # of a checksum in the name of a file; more only where another file has the short name
SEARCHED = 2**32  # bytes of other files that are searched for the name of a file before it is removed
PIECE = 2**24
PLAIN = frozenset({".json", ".html", ".htm", ".yaml", ".yml", ".md", ".txt", ".log"})  # reports name what was written


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A file with the weights of a model that is not in its place yet.

    Attributes:
        path: where it is.
        name: what it will be called, and what the model calls it.
        sha256: its checksum.
    """

    path: Path
    name: str
    sha256: str


def weights_name(target: Path, digest: str) -> str:
    """Return the name of the file with the weights of `target`, whose checksum is `digest`."""
    names = [f"{target.name}.{digest[:count]}.data" for count in DIGITS]
    free = (n for n in names if not os.path.lexists(target.parent / n) or _holds(target.parent / n, digest))
    return next(free, names[-1])


def place(target: Path, graph: Path, weights: Weights | None = None) -> None:
    """Move a model to its place, and remove files with weights that were written for the same place before.

    Args:
        target: where the graph goes.
        graph: the model file, on the same file system.
        weights: the file that it names for its weights, if there is one.

    Raises:
        OSError: a file cannot be moved.
    """
    with _alone(target.parent):
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


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other runs from moving files to a folder, where the system can."""
    handle = None
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except (ImportError, OSError):  # Windows, network file systems without locks
        pass
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _tidy(target: Path, current: str | None) -> None:
    """Remove weights of models that `target` was before, and of runs that were killed, unless a file names them.

    Models name their weights by a path that leads from their own folder down.
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
    """Return those names that a file holds or a link leads to; all of them where too much would have to be read."""
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
