"""Mutations of a file as bytes, without and with knowing where the fields of its messages are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

Rng = np.random.Generator
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
FIELDS = 40  # numbers of fields that ONNX uses, and some that it does not


@dataclass(frozen=True, slots=True)
class Field:
    """A field: the bytes of its tag start at `start`, those of its value at `value`; it ends at `end`."""

    start: int
    value: int
    end: int
    number: int
    kind: int


def flipped(data: bytes, rng: Rng) -> bytes:
    """Some bits the other way round."""
    made = np.frombuffer(data, np.uint8).copy()
    for place in rng.integers(0, len(made), int(rng.choice([1, 1, 2, 4, 16]))):
        made[place] ^= 1 << int(rng.integers(8))
    return made.tobytes()


def overwritten(data: bytes, rng: Rng) -> bytes:
    """Some bytes anything."""
    made = np.frombuffer(data, np.uint8).copy()
    start = int(rng.integers(len(made)))
    length = int(rng.choice([1, 2, 8, 64]))
    made[start : start + length] = rng.choice([0, 255, 127, 128]) if rng.random() < 0.5 else rng.integers(256)
    return made.tobytes()


def truncated(data: bytes, rng: Rng) -> bytes:
    """Not all of it."""
    return data[: int(rng.integers(len(data)))]


def cut_out(data: bytes, rng: Rng) -> bytes:
    """A piece is missing."""
    start, length = int(rng.integers(len(data))), int(rng.choice([1, 2, 8, 100]))
    return data[:start] + data[start + length :]


def repeated(data: bytes, rng: Rng) -> bytes:
    """A piece is there twice."""
    start, length = int(rng.integers(len(data))), int(rng.choice([1, 2, 8, 100]))
    return data[: start + length] + data[start : start + length] + data[start + length :]


def dropped(data: bytes, rng: Rng) -> bytes:
    """A field is missing, and all lengths around it fit."""
    return _edited(data, rng, lambda body, field: body[: field.start] + body[field.end :])


def doubled(data: bytes, rng: Rng) -> bytes:
    """A field is there twice."""
    return _edited(data, rng, lambda body, field: body[: field.end] + body[field.start :])


def retyped(data: bytes, rng: Rng) -> bytes:
    """A field has another number or another wire type."""

    def edit(body: bytes, field: Field) -> bytes:
        number = field.number if rng.random() < 0.5 else int(rng.integers(1, FIELDS))
        kind = int(rng.choice([VARINT, FIXED64, BYTES, FIXED32]))
        return body[: field.start] + _varint(number << 3 | kind) + body[field.value :]

    return _edited(data, rng, edit)


def revalued(data: bytes, rng: Rng) -> bytes:
    """A number is an extreme one; bytes are other bytes."""

    def edit(body: bytes, field: Field) -> bytes:
        head = body[: field.value]
        if field.kind == VARINT:
            return head + _varint(int(rng.choice(EXTREMES))) + body[field.end :]
        if field.kind == BYTES:
            value = bytes(rng.integers(0, 256, int(rng.choice([0, 1, 7, 300])), dtype=np.uint8))
            return (
                body[: field.start]
                + _varint(field.number << 3 | BYTES)
                + _varint(len(value))
                + value
                + body[field.end :]
            )
        return head + bytes(rng.integers(0, 256, field.end - field.value, dtype=np.uint8)) + body[field.end :]

    return _edited(data, rng, edit)


EXTREMES = np.array(
    [0, 1, 2, 16, 127, 1000, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1], np.uint64
)
WIRE = (flipped, overwritten, truncated, cut_out, repeated, dropped, doubled, retyped, revalued)


def _edited(data: bytes, rng: Rng, edit: Callable[[bytes, Field], bytes]) -> bytes:
    """One field changed, at any depth; the lengths of the messages that hold it are written anew."""
    fields = list(_fields(data))
    if not fields:
        return flipped(data, rng) if data else data
    field = fields[int(rng.integers(len(fields)))]
    inner = data[_inner(data, field) : field.end] if field.kind == BYTES else b""
    if inner and rng.random() < 0.8 and list(_fields(inner)):
        made = _edited(inner, rng, edit)
        return data[: field.value] + _varint(len(made)) + made + data[field.end :]
    return edit(data, field)


def _inner(data: bytes, field: Field) -> int:
    return _number(data, field.value)[1]


def _fields(data: bytes) -> Iterator[Field]:
    """The fields of a message; none where these bytes are no message."""
    found: list[Field] = []
    place = 0
    try:
        while place < len(data):
            tag, value = _number(data, place)
            number, kind = tag >> 3, tag & 7
            end = value + {FIXED64: 8, FIXED32: 4}.get(kind, 0)
            if kind == VARINT:
                end = _number(data, value)[1]
            elif kind == BYTES:
                length, end = _number(data, value)
                end += length
            elif kind not in (FIXED64, FIXED32):
                return
            if not number or end > len(data):
                return
            found.append(Field(place, value, end, number, kind))
            place = end
    except IndexError:
        return
    yield from found


def _number(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
        if byte < 0x80:
            return value, place


def _varint(value: int) -> bytes:
    found = []
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
