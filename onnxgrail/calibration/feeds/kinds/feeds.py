"""Readers of ready-made feeds: test_data_set folders, Polygraphy files, functions and iterables."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.calibration.feeds.kinds.kind import Kind, with_suffix
from onnxgrail.calibration.feeds.matching import from_mapping
from onnxgrail.calibration.feeds.parts import Part, natural, readable
from onnxgrail.calibration.feeds.reading import Reading
from onnxgrail.calibration.feeds.signature import Signature, describe
from onnxgrail.core import Array
from onnxgrail.errors import DataError
from onnxgrail.machine.scripts import called, explained, is_named

FEED_LIMIT = 1024
MARKS = ("polygraphy_class", "__polygraphy_encoded_ndarray")  # of newer and older files


def from_feeds(feeds: Iterable[Any], signature: Signature, source: str, limit: int | None) -> tuple[Part, ...]:
    """Read ready feeds from an iterable of dicts; keep them in memory so that every pass sees the same values.

    Args:
        feeds: dicts of arrays by input name.
        signature: the model's inputs.
        source: name of the data in messages.
        limit: maximum number of feeds; None for `FEED_LIMIT`.

    Raises:
        DataError: an item is not a dict of the model's inputs, there are no items, or the iterable raises.
    """
    parts: list[Part] = []
    items = _read(feeds, source, limit)
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


def _read(feeds: Iterable[Any], source: str, limit: int | None) -> list[Any]:
    """Return the first feeds, and one more if there is one."""
    with explained(source):
        some = islice(feeds, (limit or FEED_LIMIT) + 1)
        return list(some if isinstance(feeds, Sequence) else map(_copied, some))


def again(source: Any, limit: int | None) -> Any:
    """Return data that can be read several times: the feeds of an iterator, which cannot, in a list.

    Raises:
        DataError: the iterator raises.
    """
    return _read(source, "feeds", limit) if isinstance(source, Iterator) else source


def _copied(item: Any) -> Any:
    """Return a feed with arrays of its own: many readers fill the same ones again for the next feed."""
    return {name: _copy(array) for name, array in item.items()} if isinstance(item, Mapping) else item


def _copy(array: Any) -> Any:
    """Return a copy of an array or tensor."""
    made = getattr(array, "clone" if hasattr(array, "clone") else "copy", None)
    return made() if callable(made) else array


# ------------------------------------------------------------------------------------------------ ONNX test data sets


def has_protobufs(folder: Path) -> bool:
    """Return True if a folder is a test_data_set or contains test_data_set folders."""
    return folder.is_dir() and (any(folder.glob("input_*.pb")) or bool(_sets(folder)))


def is_protobuf(file: Path) -> bool:
    """Return True if a path relative to the folder is an input of a test_data_set."""
    return file.match("input_*.pb") and (len(file.parts) == 1 or file.parts[0].startswith("test_data_set_"))


def _sets(folder: Path) -> list[Path]:
    return [f for f in sorted(folder.glob("test_data_set_*"), key=natural) if f.is_dir()]


def from_protobufs(folder: Path, signature: Signature, _: Reading, __: int | None) -> tuple[Part, ...]:
    """Read a ready feed per folder of `input_*.pb`; a tensor of unknown name feeds the input of its number."""
    return tuple(_data_set(f, signature) for f in ([folder] if any(folder.glob("input_*.pb")) else _sets(folder)))


def _data_set(folder: Path, signature: Signature) -> Part:
    from onnx import TensorProto, numpy_helper

    files = sorted(folder.glob("input_*.pb"), key=natural)
    arrays: dict[str, Array] = {}
    known = {entry.name for entry in signature}
    for number, file in enumerate(files):
        with readable(file):
            tensor = TensorProto.FromString(file.read_bytes())
            if tensor.data_location == TensorProto.EXTERNAL:
                raise DataError(f"{str(file)!r} points to another file", hint="Store the values inside the .pb")
            name = tensor.name
            if name not in known:
                name = signature[number].name if number < len(signature) else file.stem
            arrays[name] = numpy_helper.to_array(tensor)
    return from_mapping(arrays, signature, folder.name, ready=True)


# ---------------------------------------------------------------------------------------------------------- Polygraphy


def from_polygraphy(path: Path, signature: Signature, _: Reading, __: int | None) -> tuple[Part, ...]:
    """Read ready feeds written by `polygraphy run --save-inputs`: a list of dicts of encoded arrays.

    Raises:
        DataError: the file is broken or has other contents.
    """
    with readable(path):
        feeds = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(feeds, list) or not feeds or not all(isinstance(feed, dict) for feed in feeds):
        raise DataError(
            f"{str(path)!r} is not a list of inputs",
            hint="Write it with `polygraphy run model.onnx --save-inputs FILE`",
        )
    parts = []
    for number, feed in enumerate(feeds):
        source = f"{path.name}, item {number}"
        arrays = {name: _decoded(value, f"{source}, {name!r}") for name, value in feed.items() if name not in MARKS}
        parts.append(from_mapping(arrays, signature, source, ready=True))
    return tuple(parts)


def _decoded(value: Any, source: str) -> Array:
    """Decode an array from the bytes of an .npy file in base64."""
    if not isinstance(value, dict) or not isinstance(value.get("array"), str):
        raise DataError(f"{source}: not an encoded array", hint="Save arrays with polygraphy.json.save_json")
    with readable(source):
        array = np.load(io.BytesIO(base64.b64decode(value["array"], validate=True)), allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise DataError(f"{source}: not an encoded array", hint="Save arrays with polygraphy.json.save_json")
    return array


# ----------------------------------------------------------------------------------------------------------- functions


def from_function(path: Path, signature: Signature, _: Reading, limit: int | None) -> tuple[Part, ...]:
    """Run `file.py:function` and read what it returns: feeds, or arrays by name.

    Raises:
        DataError: there is no such function, it raises, or its result does not fit.
    """
    with called(str(path)) as feeds:
        if isinstance(feeds, Mapping):
            return (from_mapping(feeds, signature, path.name),)
        if not isinstance(feeds, Iterable):
            raise DataError(
                f"{path.name} returns {type(feeds).__name__}, expected an iterable of dicts of arrays by input name",
                hint=f"The model takes: {describe(signature)}",
            )
        return from_feeds(feeds, signature, path.name, limit)


FUNCTION = Kind(lambda path: is_named(str(path)), from_function)
POLYGRAPHY = Kind(with_suffix(".json"), from_polygraphy)
PROTOBUFS = Kind(has_protobufs, from_protobufs, holds=is_protobuf)
