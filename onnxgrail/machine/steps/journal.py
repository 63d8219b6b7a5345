"""A folder in which a run stores its finished steps, so that a killed run can be continued (`--resume`).

`manifest.json` identifies the run; each finished step is one file, written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from onnxgrail.errors import DataError, OutputError, UsageError
from onnxgrail.machine.files import drafts
from onnxgrail.machine.files.paths import make_folder, write_text, write_whole
from onnxgrail.machine.steps.codec import Record, decode, encode

FORMAT = 1
PATIENCE = 2.0  # seconds to wait for a lock: a killed run holds it until its memory is freed
MANIFEST, STEPS, SCRATCH, LOCK = "manifest.json", "steps", "scratch", "lock"


def files(place: Path) -> list[Path]:
    """Return the paths of the files in such a folder, one of each kind."""
    return [place / MANIFEST, place / LOCK, place / STEPS / "step.npz"]


class Journal(Protocol):
    """Records of finished steps by key."""

    def get(self, key: str, /) -> Record | None:
        """Return the record of a key; None if the step has not been finished."""

    def put(self, key: str, record: Record, /) -> None:
        """Store a finished step."""


class NoJournal:
    """The journal of a run that cannot be continued; it stores nothing."""

    def get(self, _: str, /) -> Record | None:
        """Return None."""
        return None

    def put(self, _: str, record: Record, /) -> None:
        """Do nothing."""


NO_JOURNAL = NoJournal()
SEARCH = ("harm ", "fitted ", "compared ", "loss ")  # how the keys of small records of a search begin


class Searched:
    """A journal in memory, of the steps of a search alone, by which a run may search once more.

    It knows such steps of the journal before it, too, and none of the others.
    """

    def __init__(self, before: Journal = NO_JOURNAL) -> None:
        self._before = before
        self._records: dict[str, Record] = {}

    def get(self, key: str) -> Record | None:
        """Return the record of a key; None if it is no step of a search, or has not been finished."""
        if not key.startswith(SEARCH):
            return None
        return self._records.get(key) or self._before.get(key)

    def put(self, key: str, record: Record) -> None:
        """Keep a finished step of a search, also in place of a record before."""
        if key.startswith(SEARCH):
            self._records[key] = record


class Folder:
    """A journal on disk.

    It is opened in two steps: the names of its output files are read before the model, but only after the model has
    been read can `begin` check that the folder belongs to this run.
    """

    def __init__(self, place: Path) -> None:
        """Open a folder, or create it.

        Raises:
            OutputError: it is not such a folder, cannot be written, or another run uses it.
        """
        self._place = place
        make_folder(place)
        links = [name for name in (MANIFEST, STEPS, SCRATCH, LOCK) if (place / name).is_symlink()]
        if links:  # files written to them would end up elsewhere
            raise OutputError(f"--resume {str(place)!r}: {links[0]!r} is a link", hint="Choose another folder")
        self._read()  # refuses a folder of other files before anything is created in it
        self._lock = _locked(place)
        self._manifest = self._read()  # again, now that no other run writes to it
        shutil.rmtree(place / SCRATCH, ignore_errors=True)
        for name in (SCRATCH, STEPS):
            (place / name).mkdir(exist_ok=True)
        for folder in (place, place / STEPS):
            drafts.clear(folder)

    def begin(self, run: Mapping[str, Any]) -> None:
        """Check that the folder belongs to this run; assign an empty folder to it.

        Raises:
            UsageError: it belongs to another run.
        """
        run = json.loads(json.dumps(run))
        if not self._manifest:
            self._write({"format": FORMAT, "run": run, "writes": [], "done": False})
            return
        differences = list(_differences(self._manifest["run"], run))
        if differences:
            raise UsageError(
                f"--resume {str(self._place)!r} belongs to another run: {'; '.join(differences)}",
                hint="Repeat that run's command, or choose another folder",
            )

    def get(self, key: str) -> Record | None:
        """Return the record of a key; None if there is none, or if its file is damaged: the step is then repeated."""
        try:
            found = decode(self._file(key).read_bytes())
        except (OSError, DataError):
            return None
        return Record(arrays=found.arrays, notes=found.notes["notes"]) if found.notes.get("key") == key else None

    def put(self, key: str, record: Record) -> None:
        """Store a finished step.

        Raises:
            OutputError: it cannot be written.
        """
        whole = Record(arrays=record.arrays, notes={"key": key, "notes": dict(record.notes)})
        # Not durable: a damaged file is written again.
        write_whole(self._file(key), lambda file: file.write(encode(whole)), durable=False)

    def writes(self, path: Path) -> bool:
        """Return True if this run has begun to write a file, which it may then replace."""
        return str(path.resolve()) in self._manifest.get("writes", ())

    def about_to_write(self, *paths: Path) -> None:
        """Note that this run is going to write files outside the folder."""
        names = [str(path.resolve()) for path in paths]
        self._write({**self._manifest, "writes": sorted({*self._manifest["writes"], *names})})

    def scratch(self, target: Path) -> Path | None:
        """Return a folder for drafts of `target`; None if it is on another file system, where a rename cannot work."""
        scratch = self._place / SCRATCH
        return scratch if scratch.stat().st_dev == target.parent.stat().st_dev else None

    def finish(self) -> None:
        """Note that the run is complete."""
        self._write({**self._manifest, "done": True})

    def close(self) -> None:
        """Release the folder for other runs."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _file(self, key: str) -> Path:
        return self._place / STEPS / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"

    def _read(self) -> dict[str, Any]:
        path = self._place / MANIFEST
        if not path.exists():
            own = (STEPS, SCRATCH, LOCK)  # a run that was killed early leaves these, empty
            left = [path for path in self._place.iterdir() if not path.name.startswith(drafts.HIDDEN)]
            strange = [p.name for p in left if p.name not in own or (p.is_dir() and any(p.iterdir()))]
            if strange:
                raise OutputError(
                    f"--resume {str(self._place)!r} holds other files ({min(strange)})", hint="Choose an empty folder"
                )
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] == FORMAT and isinstance(found["run"], dict) and _words(found["writes"]):
                return dict(found)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise OutputError(f"{str(path)!r} is not a manifest: {error}", hint="Choose another folder") from error
        raise OutputError(f"{str(path)!r} is of another format", hint="Choose another folder")

    def _write(self, manifest: dict[str, Any]) -> None:
        self._manifest = manifest
        write_text(self._place / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _locked(place: Path) -> int | None:
    """Return the handle of a lock that ends with the process; None if the system has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    handle = os.open(place / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < end:
                time.sleep(0.02)
                continue
            os.close(handle)
            hint = "Wait for it, or choose another folder"
            raise OutputError(f"another run works in {str(place)!r}", hint=hint) from error
        except OSError:  # a network file system without locks
            pass
        return handle


def _differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Return the differences between two manifests in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [*before, *(key for key in now if key not in before)]
        return [d for key in keys for d in _differences(before.get(key), now.get(key), key)]
    return [] if before == now else [f"{name} was {_short(before)}, now {_short(now)}"]


def _short(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value):
        return value[:8]  # a checksum
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:16]}..."
