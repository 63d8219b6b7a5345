"""Protobuf messages field by field: as much of the encoding as it takes to leave large fields where they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, overload

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5  # wire types


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its number and wire type, where its head begins, and where its content is."""

    number: int
    kind: int
    head: int
    start: int
    stop: int


class Bytes(Protocol):
    """Bytes, in memory or not."""

    @overload
    def __getitem__(self, place: int, /) -> int: ...

    @overload
    def __getitem__(self, place: slice, /) -> memoryview: ...


def fields(data: Bytes, start: int, stop: int) -> Iterator[Field]:
    """The fields of the message in data[start:stop].

    Raises:
        ValueError: it is no message, or one with groups, which no current writer makes.
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
            raise ValueError("a field ends behind its message")
        yield Field(tag >> 3, kind, begin, place, place + size)
        place += size


def head(field: int, length: int) -> bytes:
    """What stands in front of a field of bytes: its number and its length, seven bits at a time."""
    found = [field << 3 | BYTES]
    while length > 0x7F:
        found.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*found, length])


def _number(data: Bytes, place: int, stop: int) -> tuple[int, int]:
    """A number written seven bits at a time, and where it ends."""
    found = shift = 0
    while place < stop and shift < 64:
        byte = data[place]
        found |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return found, place
        shift += 7
    raise ValueError("a number without an end")
