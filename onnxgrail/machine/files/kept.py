"""Results that depend on the machine, kept in the user's cache folder: computed once, the same in every later run.

One file per result, written whole. A file that is damaged or is about something else is written again; where nothing
can be read or written, results are computed in each run. The least recently used files go if there are too many.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from onnxgrail.errors import OutputError
from onnxgrail.machine.files.drafts import clear, locked
from onnxgrail.machine.files.paths import write_whole
from onnxgrail.machine.steps.codec import Codec, Record

T = TypeVar("T")

NAMED = "ONNXGRAIL_CACHE"  # variable of the environment with the folder; empty: nothing is kept
OWN = re.compile("[0-9a-f]{32}[.]json")
ROOM, BLOCK = 2**25, 2**12  # bytes of all files, each a number of blocks
DAMAGED = (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError)


def cache_folder() -> Path | None:
    """Return the folder whose files later runs use, None if there is none: of `ONNXGRAIL_CACHE`, else of the user."""
    named = os.environ.get(NAMED)
    if named is not None:
        return Path(named) if named else None
    try:
        home = Path.home()
    except RuntimeError:  # the user has none
        return None
    usual = {"win32": home / "AppData/Local", "darwin": home / "Library/Caches"}.get(sys.platform, home / ".cache")
    given = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    return (Path(given) if Path(given).is_absolute() else usual) / "onnxgrail"


def once(about: Mapping[str, Any], make: Callable[[], T], codec: Codec[T]) -> T:
    """Return what an earlier run has kept, else compute and keep it.

    If two runs compute it at the same time, both return what was kept first.

    Args:
        about: all that the result depends on.
        make: computes it.
        codec: its storage format, with notes only; `decode` raises one of `DAMAGED` on notes that it does not write.
    """
    folder = cache_folder()
    if folder is None:
        return make()
    text = json.dumps(about, sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def kept() -> T | None:
        with contextlib.suppress(*DAMAGED):
            if path.is_file() and path.stat().st_size <= ROOM:
                stored = json.loads(path.read_text(encoding="utf-8"))
                if stored["about"] == json.loads(text):
                    return codec.decode(Record(notes=stored["notes"]))
        return None

    found = kept()
    if found is not None:
        with contextlib.suppress(OSError):
            os.utime(path)
        return found
    made = make()
    stored = json.dumps({"about": about, "notes": codec.encode(made).notes}).encode()
    with contextlib.suppress(OSError, OutputError), contextlib.ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        handle = locked(folder, wait=True)
        if handle is not None:
            stack.callback(os.close, handle)
        found = kept()
        if found is not None:
            return found
        write_whole(path, lambda file: file.write(stored), durable=False)
        clear(folder)
        _tidy(folder)
    return made


def _tidy(folder: Path) -> None:
    """Remove the files that were not used for longest, until the others have room."""
    files = [(path, path.stat()) for path in folder.iterdir() if OWN.fullmatch(path.name)]
    left = ROOM
    for path, about in sorted(files, key=lambda file: -file[1].st_mtime_ns):
        left -= -(-about.st_size // BLOCK) * BLOCK
        if left < 0:
            path.unlink(missing_ok=True)
