"""The kinds of calibration data: a line each in `registry.DATA_KINDS`, with a reader in a module of this folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxgrail import registry
from onnxgrail.calibration.feeds.kinds.kind import Kind
from onnxgrail.calibration.feeds.parts import Part
from onnxgrail.calibration.feeds.reading import Reading
from onnxgrail.calibration.feeds.signature import Signature
from onnxgrail.errors import DataError, OnnxGrailError, raised
from onnxgrail.machine.files.paths import Read
from onnxgrail.machine.scripts import is_named
from onnxgrail.registry import is_ours

KINDS: Mapping[str, Kind] = registry.DATA_KINDS


def read_parts(
    path: str | os.PathLike[str], signature: Signature, limit: int | None, reading: Reading
) -> tuple[Part, ...]:
    """Read the parts at a path, in the order of their names.

    Args:
        path: a file, a folder, or `file.py:function`.
        signature: the model's inputs.
        limit: maximum number of feeds to take from a function.
        reading: the user's settings.

    Raises:
        DataError: there are no data, the kind is unknown, data are unreadable, or names are not the model's.
        MissingExtraError: this kind needs a package that is not installed.
        UsageError: a setting has no effect on this kind.
    """
    place = Path(path)
    name = _name(place)
    if name is None:
        raise _unknown(place)
    kind = KINDS[name]
    reading.unused(kind.takes, name)
    try:
        return kind.read(place, signature, reading, limit)
    except (OnnxGrailError, MemoryError):
        raise
    except Exception as error:
        if is_ours(getattr(kind.read, "func", kind.read)):
            raise
        raise DataError(f"data of the kind {name!r}: its reader {raised(error)}") from error


def reads(path: str | os.PathLike[str], what: str) -> Read:
    """Return the files that calibration data read, for `paths.check_targets`; `what` names them in messages."""
    place = Path(path)
    if is_named(str(place)):
        return Read(path=Path(str(place).rpartition(":")[0]), what=what)
    name = _name(place)
    return Read(path=place, what=what) if name is None else Read(path=place, what=what, holds=KINDS[name].holds)


def takes(source: Any) -> frozenset[str]:
    """Return the settings of `Reading` that have an effect on data; none if they are at no path, or unknown."""
    name = _name(Path(source)) if isinstance(source, str | os.PathLike) else None
    return frozenset() if name is None else KINDS[name].takes


def _name(path: Path) -> str | None:
    return next((name for name, kind in KINDS.items() if kind.matches(path)), None)


def _unknown(place: Path) -> DataError:
    text, hint = str(place), f"Give {registry.MENU}"
    if not place.exists():
        return DataError(f"no calibration data at {text!r}", hint=hint)
    if place.is_dir():
        return DataError(f"nothing to calibrate with in folder {text!r}", hint=hint)
    if place.suffix.lower() == ".py":
        wanted = f"Write {text}:function, which returns an iterable of dicts"
        return DataError(f"{text!r} names no function", hint=wanted)
    if (beside := _name(place.parent)) is not None and KINDS[beside].holds(Path(place.name)):
        hint = f"Give the folder: {str(place.parent)!r} is {beside}"
    return DataError(
        f"calibration data {text!r}: the kind {place.suffix or 'without suffix'!r} is not known", hint=hint
    )
