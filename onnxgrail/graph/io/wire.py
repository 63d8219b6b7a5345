"""Parse protobuf messages field by field, so that large fields can stay in the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, overload

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5  # wire types


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message.

    Attributes:
        number: the field number; kind: the wire type.
        head: offset of the field's tag.
        start, stop: range of the content.
    """

    number: int
    kind: int
    head: int
    start: int
    stop: int


class Bytes(Protocol):
    """A sequence of bytes, in memory or in a file."""

    @overload
    def __getitem__(self, place: int, /) -> int: ...

    @overload
    def __getitem__(self, place: slice, /) -> memoryview: ...


def fields(data: Bytes, start: int, stop: int) -> Iterator[Field]:
    """Yield the fields of the message in data[start:stop].

    Raises:
        ValueError: not a message, or a message with groups, which are obsolete.
    """
    place = start
    while place < stop:
        begin = place
        tag, place = _number(data, place, stop)
        kind = tag & 7
        if kind == BYTES:
            size, place = _number(data, place, stop)
        elif kind == VARINT:
            size = _number(data, place, stop)[1] - place
        elif kind in (EIGHT, FOUR):
            size = 8 if kind == EIGHT else 4
        else:
            raise ValueError(f"wire type {kind}")
        if place + size > stop:
            raise ValueError("a field ends after its message")
        yield Field(tag >> 3, kind, begin, place, place + size)
        place += size


def head(field: int, length: int) -> bytes:
    """Return the header of a bytes field: its tag and its length as varints."""
    found = [field << 3 | BYTES]
    while length > 0x7F:
        found.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*found, length])


def _number(data: Bytes, place: int, stop: int) -> tuple[int, int]:
    """Return a varint and the offset after it."""
    found = shift = 0
    while place < stop and shift < 64:
        byte = data[place]
        found |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return found, place
        shift += 7
    raise ValueError("a number without an end")
