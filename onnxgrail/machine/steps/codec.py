"""Encode decisions as arrays and plain data, for the journal on disk and for the other processes."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from onnxgrail.core import Array, Block, BlockError, Change, Outcome, Reducer
from onnxgrail.errors import DataError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Record:
    """Arrays by name, and notes that JSON can hold; numbers are restored bit for bit."""

    arrays: Mapping[str, Array] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """The storage format of a step's result: `encode` makes a record of it, `decode` reads it back."""

    encode: Callable[[T], Record]
    decode: Callable[[Record], T]


RECORD: Codec[Record] = Codec(lambda record: record, lambda record: record)
"""For a step whose result is a record already."""


def encode(record: Record) -> bytes:
    """Return a record as the bytes of an .npz archive."""
    arrays = {str(number): _storable(array) for number, array in enumerate(record.arrays.values())}
    kinds = [np.asarray(array).dtype.name for array in record.arrays.values()]
    head = {"names": list(record.arrays), "dtypes": kinds, "notes": dict(record.notes)}
    buffer = io.BytesIO()
    np.savez(buffer, head=np.array(json.dumps(head, default=_plain)), **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def decode(data: bytes) -> Record:
    """Return the record that `encode` wrote.

    Raises:
        DataError: the bytes are not a record.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            head = json.loads(str(file["head"]))
            places = enumerate(zip(head["names"], head["dtypes"], strict=True))
            arrays = {name: _restored(file[str(number)], kind) for number, (name, kind) in places}
            return Record(arrays=arrays, notes=head["notes"])
    except Exception as error:  # numpy, zipfile and Python's tokenizer raise many types
        raise DataError(f"not a record: {error}") from error


def packed(record: Record) -> list[Array]:
    """Return a record as flat arrays of bytes, without copying its arrays."""
    arrays = [np.asarray(array) for array in record.arrays.values()]
    kinds = [[array.dtype.name if array.dtype.kind == "V" else array.dtype.str, array.shape] for array in arrays]
    head = {"names": list(record.arrays), "kinds": kinds, "notes": dict(record.notes)}
    text = np.frombuffer(json.dumps(head, default=_plain).encode(), np.uint8)
    return [text, *(np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays)]


def unpacked(parts: Sequence[Array]) -> Record:
    """Return the record that `packed` made flat; its arrays are views of the parts."""
    head = json.loads(parts[0].tobytes())
    rows = zip(head["names"], head["kinds"], parts[1:], strict=True)
    arrays = {name: part.view(np.dtype(kind)).reshape(shape) for name, (kind, shape), part in rows}
    return Record(arrays=arrays, notes=head["notes"])


def _plain(number: Any) -> Any:
    """Return a numpy number as a JSON number."""
    return number.item()


def _storable(array: Array) -> Array:
    """Return an array without the float types that numpy only stores as bytes (bfloat16)."""
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" else array


def _restored(array: Array, kind: str) -> Array:
    return array if array.dtype.name == kind else array.view(np.dtype(kind))


def of_change(change: Change) -> Record:
    """Return the record of a decision about a block."""
    arrays: dict[str, Array] = {"kept": change.reducer.kept}
    if change.reducer.cluster is not None:
        arrays["cluster"] = change.reducer.cluster
    arrays |= {f"slot {number}": values for number, values in change.weights}
    outcome, error = dataclasses.asdict(change.outcome), dataclasses.asdict(change.error)
    notes = {"outcome": outcome, "error": error, "selector": change.selector}
    return Record(arrays=arrays, notes=notes)


def change_of(record: Record, block: Block) -> Change:
    """Return the decision that `of_change` recorded."""
    slots = [(int(name.removeprefix("slot ")), a) for name, a in record.arrays.items() if name.startswith("slot ")]
    return Change(
        block=block,
        reducer=Reducer(kept=record.arrays["kept"], cluster=record.arrays.get("cluster")),
        selector=record.notes["selector"],
        weights=tuple(slots),
        outcome=Outcome(**record.notes["outcome"]),
        error=BlockError(**record.notes["error"]),
    )
