"""Arrays out of the files people keep calibration data in.  Nothing here unpickles."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.calibration.signature import Signature, check_names, describe
from onnxgrail.core import Array
from onnxgrail.errors import DataError

FEED_LIMIT = 1024
IGNORED = "labels"  # data sets carry them beside the inputs; no statistic reads them
KINDS = ".npz, .npy, a folder of those, test_data_set_* folders (.pb) or file.py:function"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """Arrays that belong together: one file, or one ready feed.

    Attributes:
        source: what messages call it.
        arrays: one array per model input.
        ready: the arrays are one feed already and are never cut into batches.
        notes: what was ignored or assumed while reading.
    """

    source: str
    arrays: Mapping[str, Array]
    ready: bool = False
    notes: tuple[str, ...] = ()


def read_parts(path: str | Path, signature: Signature, limit: int | None) -> tuple[Part, ...]:
    """The parts found at a path, in the order of their names.

    Args:
        path: a file, a folder, or `file.py:function`.
        signature: the model's inputs.
        limit: how many feeds to take from a function at most.

    Raises:
        DataError: nothing there, not a known kind, unreadable, or names that are not the model's.
    """
    text = str(path)
    script = re.fullmatch(r"(.+\.py):(\w+)", text)
    if script:
        return _from_function(Path(script[1]), script[2], signature, limit)
    place = Path(path)
    if not place.exists():
        raise DataError(f"no calibration data at {text!r}", hint=f"Give {KINDS}")
    if place.is_dir():
        return _from_folder(place, signature)
    if place.suffix.lower() == ".npz":
        return (_from_npz(place, signature),)
    if place.suffix.lower() == ".npy":
        return (_from_npy(place, signature),)
    if place.suffix.lower() == ".py":
        raise DataError(
            f"{text!r} names no function", hint=f"Write {text}:function, which returns an iterable of dicts"
        )
    raise DataError(
        f"calibration data {text!r}: the kind {place.suffix or 'without suffix'!r} is not known", hint=f"Give {KINDS}"
    )


def from_mapping(arrays: Mapping[str, Any], signature: Signature, source: str, *, ready: bool = False) -> Part:
    """One part from arrays by input name; an array called `labels` is left out with a note.

    Raises:
        DataError: an input is missing or a name is unknown.
    """
    names = {str(n) for n in arrays}
    drop = IGNORED in names and all(entry.name != IGNORED for entry in signature)
    notes = (f"{source}: array {IGNORED!r} is not an input of the model and was ignored",) if drop else ()
    check_names(names - {IGNORED} if drop else names, signature, source)
    found = {entry.name: np.asarray(arrays[entry.name]) for entry in signature}
    return Part(source=source, arrays=found, ready=ready, notes=notes)


def from_feeds(feeds: Iterable[Any], signature: Signature, source: str, limit: int | None) -> tuple[Part, ...]:
    """Ready feeds from an iterable of dicts, kept in memory so that every pass sees the same values.

    Raises:
        DataError: an item is not a dict of the model's inputs, there is none, or the iterable raises.
    """
    parts: list[Part] = []
    with _foreign(source):
        items = list(islice(feeds, (limit or FEED_LIMIT) + 1))
    for number, item in enumerate(items[: limit or FEED_LIMIT]):
        if not isinstance(item, Mapping):
            raise DataError(
                f"{source}, item {number}: got {type(item).__name__}, expected a dict of arrays by input name",
                hint=f"The model takes: {describe(signature)}",
            )
        parts.append(from_mapping(item, signature, f"{source}, item {number}", ready=True))
    if not parts:
        raise DataError(f"{source}: no samples", hint="Give at least one dict of arrays by input name")
    if limit is None and len(items) > FEED_LIMIT:
        last = parts[-1]
        note = f"{source}: stopped after {FEED_LIMIT} feeds; --samples sets another number"
        parts[-1] = Part(source=last.source, arrays=last.arrays, ready=True, notes=(*last.notes, note))
    return tuple(parts)


def _from_npz(path: Path, signature: Signature) -> Part:
    with _readable(path), np.load(path, allow_pickle=False) as file:
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise DataError(f"{str(path)!r} is not an .npz archive", hint="Write it with numpy.savez")
        # Names first: an archive that does not fit is refused before gigabytes are read.
        return from_mapping(_Lazy(file), signature, path.name)


class _Lazy(Mapping[str, Any]):
    """An archive as a mapping that reads an array only when asked for it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getitem__(self, name: str) -> Any:
        return self._file[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.files)

    def __len__(self) -> int:
        return len(self._file.files)


def _from_npy(path: Path, signature: Signature) -> Part:
    if len(signature) != 1:
        raise DataError(
            f"{path.name} holds one array, the model takes {len(signature)} inputs",
            hint=f"Save an .npz with: {describe(signature)}",
        )
    return Part(source=path.name, arrays={signature[0].name: _array(path)})


def _array(path: Path) -> Array:
    with _readable(path):
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise DataError(f"{str(path)!r} is not an .npy array", hint="Write it with numpy.save")
        return array


def _from_folder(folder: Path, signature: Signature) -> tuple[Part, ...]:
    if any(folder.glob("input_*.pb")):
        return (_from_protobufs(folder, signature),)
    sets = [f for f in sorted(folder.glob("test_data_set_*"), key=_natural) if f.is_dir()]
    if sets:
        return tuple(_from_protobufs(f, signature) for f in sets)
    archives, arrays = sorted(folder.glob("*.npz"), key=_natural), sorted(folder.glob("*.npy"), key=_natural)
    if archives and arrays:
        raise DataError(f"{str(folder)!r} holds both .npz and .npy files", hint="Keep one kind")
    if archives:
        return tuple(_from_npz(f, signature) for f in archives)
    names = {f.stem for f in arrays}
    if len(signature) > 1 or names & {entry.name for entry in signature}:
        if arrays:
            return (from_mapping({f.stem: _array(f) for f in arrays}, signature, folder.name),)
    elif arrays:
        return tuple(_from_npy(f, signature) for f in arrays)
    raise DataError(f"nothing to calibrate with in folder {str(folder)!r}", hint=f"Give {KINDS}")


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(t), "") if t.isdigit() else (-1, t) for t in re.split(r"(\d+)", path.name)]


def _from_protobufs(folder: Path, signature: Signature) -> Part:
    from onnx import TensorProto, numpy_helper

    files = sorted(folder.glob("input_*.pb"), key=_natural)
    arrays: dict[str, Array] = {}
    known = {entry.name for entry in signature}
    for number, file in enumerate(files):
        with _readable(file):
            tensor = TensorProto.FromString(file.read_bytes())
            if tensor.data_location == TensorProto.EXTERNAL:
                raise DataError(f"{str(file)!r} points to another file", hint="Store the values inside the .pb")
            name = (
                tensor.name
                if tensor.name in known
                else signature[number].name
                if number < len(signature)
                else file.stem
            )
            arrays[name] = numpy_helper.to_array(tensor)
    return from_mapping(arrays, signature, folder.name, ready=True)


def _from_function(path: Path, name: str, signature: Signature, limit: int | None) -> tuple[Part, ...]:
    if not path.is_file():
        raise DataError(f"no file {str(path)!r}", hint="Give file.py:function")
    source = f"{path.name}:{name}"
    with _foreign(source), _importable(path.parent):
        spec = importlib.util.spec_from_file_location(f"_onnxgrail_data_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise DataError(f"{str(path)!r} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, name):
            raise DataError(f"{str(path)!r} defines no {name!r}", hint="Give file.py:function")
        made = getattr(module, name)
        feeds = made() if callable(made) else made
        if isinstance(feeds, Mapping):
            return (from_mapping(feeds, signature, source),)
        return from_feeds(feeds, signature, source, limit)


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """The user's file may import its neighbours, as it would when run as a script."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


@contextlib.contextmanager
def _foreign(source: str) -> Iterator[None]:
    """Turn whatever the user's code raises into one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{source} raised {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what numpy, zipfile and protobuf raise on a broken file into one line."""
    try:
        yield
    except DataError:
        raise
    except ValueError as error:
        if "pickle" in str(error).lower():
            hint = "Save plain arrays; pickled objects are never loaded"
            raise DataError(f"{str(path)!r} holds pickled objects", hint=hint) from error
        raise DataError(f"cannot read {str(path)!r}: {error}") from error
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {str(path)!r}: {error}") from error
    except Exception as error:  # protobuf raises its own, unrelated to any built-in
        raise DataError(f"cannot read {str(path)!r}: {type(error).__name__}: {error}") from error
