"""Passages of equal length, cut from a text for models without an attention mask: padding would count as text."""

from __future__ import annotations

import codecs
import io
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from onnxgrail.calibration.feeds.matching import from_mapping
from onnxgrail.calibration.feeds.parts import Column, Part, readable
from onnxgrail.calibration.feeds.signature import Input, Signature
from onnxgrail.core import Array, Ints
from onnxgrail.errors import DataError

if TYPE_CHECKING:
    from onnxgrail.calibration.feeds.kinds.text import Tokens

PROBE = 2**14  # bytes from which the bytes per token are estimated


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Text:
    """A UTF-8 text that is read in pieces.

    Attributes:
        name: its name in notes.
        place: its path, or what stands for it in messages.
        size: its bytes.
        open: returns it as a file.
    """

    name: str
    place: Path | str
    size: int
    open: Callable[[], BinaryIO]


def text_of(path: Path) -> Text:
    """Return the text of a file.

    Raises:
        DataError: it cannot be read.
    """
    with readable(path):
        return Text(name=path.name, place=path, size=path.stat().st_size, open=lambda: path.open("rb"))


def joined(texts: Iterable[str], name: str) -> Text:
    """Return one text of several, with an empty line between them."""
    data = "\n\n".join(texts).encode("utf-8")
    return Text(name=name, place=name, size=len(data), open=partial(io.BytesIO, data))


def passages(text: Text, signature: Signature, ids: Input, tokens: Tokens) -> Part:
    """Return passages of a text, spread over all of it, with the same number of tokens each.

    Raises:
        DataError: there is no text, it is not UTF-8, or it is shorter than the model's length.
    """
    first = _decoded(text, 0, PROBE)
    encoded = tokens.encode(first).ids
    if not encoded or (text.size <= PROBE and not first.strip()):  # special tokens alone are not text
        raise DataError(f"{str(text.place)!r} holds no text", hint="Give a text of some pages")
    if len(encoded) < tokens.length and text.size > PROBE:
        encoded = tokens.encode(_decoded(text, 0, text.size)).ids
    if len(encoded) < tokens.length:
        if tokens.fixed:
            raise DataError(f"{text.name}: got {len(encoded)} tokens, the model takes {ids}", hint="Give more text")
        tokens.length = len(encoded)
    count = max(1, text.size // _span(first, tokens))
    part = from_mapping({ids.name: Passages(text, count, tokens)}, signature, text.name)
    note = f"{text.name}: the model has no attention mask, so the text is cut into passages of {tokens.length} tokens"
    more = "" if tokens.chosen else "; --sequence-length sets another number"
    return Part(source=text.name, arrays=part.arrays, notes=(*part.notes, note + more))


def _span(text: str, tokens: Tokens) -> int:
    """Return the bytes of a typical passage plus a quarter, because a passage begins at the next word."""
    letters = range(len(text))
    low = bisect_left(letters, tokens.length, lo=1, key=lambda count: len(tokens.encode(text[:count]).ids))
    return max(1, len(text[:low].encode("utf-8")) * 5 // 4)


def _decoded(source: Text, start: int, size: int) -> str:
    """Decode text from an offset in bytes; characters cut at its ends are left out.

    Raises:
        DataError: it is not UTF-8.
    """
    with readable(source.place), source.open() as file:
        start = file.seek(start or begin(file))
        data = file.read(size)
        head = next((i for i, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), 0) if start else 0
        try:
            return data[head:].decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return data[head : head + error.start].decode("utf-8")
            raise other_encoding(source.place, start + head + error.start) from error


class Passages(Column):
    """Passages by number: each begins at a word in its own stretch of the text and has the required length."""

    def __init__(self, text: Text, count: int, tokens: Tokens) -> None:
        self.text, self.tokens = text, tokens
        super().__init__((count, tokens.length), np.dtype(np.int64))

    def rows(self, numbers: Ints) -> Array:
        """Tokenize these passages."""
        return np.asarray([self._one(int(number)) for number in numbers], np.int64).reshape(-1, self.shape[1])

    def _one(self, number: int) -> list[int]:
        total = self.text.size
        start, size = total * number // self.shape[0], -(-total // self.shape[0])
        while True:
            piece = _decoded(self.text, start, size)
            found = self.tokens.encode(_from_word(piece) if start else piece)
            ended = start + size >= total
            # Enough only if text is left over: the last word may be incomplete.
            if len(found.ids) >= self.shape[1] and (found.overflowing or ended):
                return list(found.ids)
            if not ended:
                size *= 2
            elif start == 0:
                raise DataError(f"{str(self.text.place)!r} became shorter while it was read")
            else:  # the text ends too soon: begin earlier
                start = max(0, start - size)
                size = total - start


def _from_word(text: str) -> str:
    """Return the text from its second word on, because the first may be incomplete; all of it without a space."""
    for place, letter in enumerate(text[: len(text) // 2]):
        if letter.isspace():
            return text[place + 1 :]
    return text


def begin(file: BinaryIO) -> int:
    """Return the offset of the text, after a byte-order mark if there is one."""
    return file.seek(len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0)


def other_encoding(path: Path | str, place: int) -> DataError:
    """Return the error of text that is not UTF-8."""
    return DataError(f"{str(path)!r} is not UTF-8, at byte {place}", hint="Save it as UTF-8")
