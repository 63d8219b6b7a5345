"""Find large weights inside a model file and map them without reading them.

Parsing the message as a whole would need memory for all weights at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import onnx
import onnx_ir as ir

from onnxgrail.errors import ModelError
from onnxgrail.graph.io.mapped import LARGE, Mapped
from onnxgrail.graph.io.wire import BYTES, Bytes, Field, fields, head
from onnxgrail.machine.files.unchanged import SteadyFile

BLOCK = 2**14  # bytes read at once when looking for fields
MODEL = 2**23  # bytes; weights of larger files stay in the file, smaller files are read as a whole
_GRAPH, _INITIALIZER, _NAME, _RAW, _EXTERNAL = 7, 5, 8, 9, 13  # field numbers of the messages


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A model file, split into the message without its large weights and the places of these weights.

    Attributes:
        rest: the message; its large weights refer to an external file without a name.
        places: name of the weight -> offset of its data in the model file, in bytes.
        file: the model file; it stays open, so that the weights stay readable if the file is replaced.
    """

    rest: bytes
    places: dict[str, int]
    file: SteadyFile


class _Window:
    """A file as a sequence of bytes that are read on access."""

    def __init__(self, file: SteadyFile) -> None:
        self._file, self._start, self._block = file, 0, memoryview(b"")

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> memoryview: ...

    def __getitem__(self, place: int | slice) -> int | memoryview:
        first = place.start if isinstance(place, slice) else place
        stop = place.stop if isinstance(place, slice) else place + 1
        if stop - first > BLOCK:
            return self._read(first, stop - first)
        if first < self._start or stop > self._start + len(self._block):
            self._start, self._block = first, self._read(first, min(BLOCK, self._file.size - first))
        found = self._block[first - self._start : stop - self._start]
        return found if isinstance(place, slice) else found[0]

    def _read(self, start: int, size: int) -> memoryview:
        found = memoryview(bytearray(size))
        self._file.read_into(start, found)
        return found


def split(path: Path) -> Split | None:
    """Split a model file into its message and its large weights.

    Returns:
        The two parts; None if the file is small or not encoded as expected, and should be read as a whole.

    Raises:
        OSError: the file cannot be read.
    """
    if path.stat().st_size < MODEL:
        return None
    file = SteadyFile(path.resolve(), ModelError, held=True)
    data, places = _Window(file), dict[str, int]()
    try:
        rest = b"".join(_copied(data, 0, file.size, {_GRAPH: lambda f: _graph(data, f, places)}))
    except ValueError:
        return None
    return Split(rest, places, file) if places else None


def hold(model: ir.Model, found: Split, path: Path) -> None:
    """Map the weights that `split` left in the model file, in place.

    Raises:
        ModelError: a weight has more or fewer bytes than its shape needs.
    """
    for name, offset in found.places.items():
        value = model.graph.initializers[name]
        tensor = value.const_value
        assert isinstance(tensor, ir.ExternalTensor), name
        if tensor.length != tensor.nbytes:
            fault = f"{path}: weight {name!r} holds {tensor.length} bytes, its shape needs {tensor.nbytes}"
            raise ModelError(fault, hint="Check that the file is complete and was exported as ONNX")
        value.const_value = Mapped(found.file, offset, tensor)


def _graph(data: Bytes, field: Field, places: dict[str, int]) -> bytes:
    return b"".join(_copied(data, field.start, field.stop, {_INITIALIZER: lambda f: _tensor(data, f, places)}))


def _tensor(data: Bytes, field: Field, places: dict[str, int]) -> bytes:
    """Return the message of a weight; a large one without its numbers and with a reference to their place."""
    parts = {part.number: part for part in fields(data, field.start, field.stop)}
    raw, name = parts.get(_RAW), parts.get(_NAME)
    if raw is None or name is None or raw.stop - raw.start < LARGE or _EXTERNAL in parts:
        return bytes(data[field.start : field.stop])
    label = bytes(data[name.start : name.stop]).decode()
    if label in places:
        raise ValueError(f"two weights {label}")
    places[label] = raw.start
    rest = b"".join(_copied(data, field.start, field.stop, {_RAW: None}))
    away = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", "."), ("offset", raw.start), ("length", raw.stop - raw.start)):
        away.external_data.add(key=key, value=str(value))
    refers: bytes = away.SerializeToString()
    return rest + refers


def _copied(data: Bytes, start: int, stop: int, changed: dict[int, Any]) -> Iterator[bytes]:
    """Yield the fields of a message; those with a number in `changed` are replaced, or dropped if it maps to None."""
    for field in fields(data, start, stop):
        if field.number not in changed or field.kind != BYTES:
            yield bytes(data[field.head : field.stop])
        elif (make := changed[field.number]) is not None:
            body = make(field)
            yield head(field.number, len(body)) + body
