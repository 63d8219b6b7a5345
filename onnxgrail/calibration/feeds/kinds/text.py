"""Readers of text, tokenized batch by batch.

If the model has an attention mask, every line is a sample.  If not, padding would count as text, so the text is cut
into passages of equal length, see `passages`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from onnxgrail.calibration.feeds.kinds.kind import TEXT, Kind, with_suffix
from onnxgrail.calibration.feeds.kinds.passages import begin, other_encoding, passages, text_of
from onnxgrail.calibration.feeds.matching import from_mapping, positions, role_of
from onnxgrail.calibration.feeds.parts import Column, Part, readable
from onnxgrail.calibration.feeds.reading import LENGTH, Reading, tokenizer_file
from onnxgrail.calibration.feeds.signature import Input, Signature, describe
from onnxgrail.core import Array, Ints
from onnxgrail.errors import DataError
from onnxgrail.machine.extras import extra

PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "</s>")
OTHERS = (".model", ".txt", ".vocab")  # suffixes of tokenizers of other libraries
WHERE = "tokenizer.json beside the model it was trained with"

Take = Callable[[int], str]
What = Literal["ids", "mask", "types", "positions"]


def from_text(path: Path, signature: Signature, reading: Reading, _: int | None) -> tuple[Part, ...]:
    """Read lines or passages of a UTF-8 text file.

    Raises:
        DataError: no tokenizer is given, it or the text is broken, or the model takes no token ids.
        MissingExtraError: tokenizers is not installed.
    """
    ids = ids_input(signature, path.name)
    tokens = Tokens.of(signature, ids, reading, path.name)
    if any(role_of(entry) == "mask" for entry in signature):
        starts = _lines(path)
        return (padded(partial(_line, path, starts), len(starts) - 1, signature, ids, tokens, path.name),)
    return (passages(text_of(path), signature, ids, tokens),)


def ids_input(signature: Signature, source: str) -> Input:
    """Return the input that takes token ids.

    Raises:
        DataError: there is none, or there are several.
    """
    tables = [
        e for e in signature if e.dtype.kind in "iu" and role_of(e) is None and (e.shape is None or len(e.shape) == 2)
    ]
    named = [e for e in tables if e.name.endswith("input_ids")]
    if len(named) == 1 or len(tables) == 1:
        return (named if len(named) == 1 else tables)[0]
    found = "several inputs could take" if tables else "no input takes"
    raise DataError(
        f"{source}: {found} token ids; the model takes: {describe(signature)}", hint="Give file.py:function"
    )


class Tokens:
    """A tokenizer with the settings for a model.

    Attributes:
        pad: id of the padding token.
        left: True if padding comes before the text.
        length: maximum number of tokens per sample.
        fixed: True if the model accepts no other length.
        chosen: True if the user or the model determines the length.
    """

    def __init__(self, tokenizer: Any, *, length: int, fixed: bool, chosen: bool) -> None:
        padding = tokenizer.padding or {}
        pads = (tokenizer.token_to_id(name) for name in PADS)
        known = next((number for number in pads if number is not None), 0)
        self.pad, self.left = int(padding.get("pad_id", known)), padding.get("direction") == "left"
        self.length, self.fixed, self.chosen = length, fixed, chosen
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_length=length)
        self.encode = tokenizer.encode

    @classmethod
    def of(cls, signature: Signature, ids: Input, reading: Reading, source: str) -> Tokens:
        """Load the user's tokenizer, with a length that the model accepts.

        Raises:
            DataError: it is not given, or broken.
            MissingExtraError: tokenizers is not installed.
        """
        if reading.tokenizer is None:
            raise DataError(f"{source}: text needs a tokenizer", hint=f"Give --tokenizer FILE ({WHERE})")
        library = extra("tokenizers", "text", "text needs tokenizers")
        file = tokenizer_file(reading.tokenizer)
        if not file.is_file():
            raise DataError(f"no tokenizer at {str(file)!r}", hint=f"Give a {WHERE}")
        if file.suffix.lower() in OTHERS:
            raise DataError(f"{str(file)!r} is no tokenizer of the library tokenizers", hint=f"Give a {WHERE}")
        with readable(file):
            tokenizer = library.Tokenizer.from_file(str(file))
        size = ids.shape[1] if ids.shape else None
        tables = [e.rows for e in signature if role_of(e) == "positions" and e.rows]
        wanted = min([reading.sequence_length or LENGTH, *tables])
        fixed = isinstance(size, int)
        length = size if isinstance(size, int) else wanted
        if reading.sequence_length is not None and fixed and reading.sequence_length != length:
            raise DataError(f"--sequence-length {reading.sequence_length}: the model takes {ids}", hint="Leave it out")
        return cls(tokenizer, length=length, fixed=fixed, chosen=fixed or reading.sequence_length is not None)


# --------------------------------------------------------------------------------------------------------------- lines


def _lines(path: Path) -> Ints:
    """Return the offsets of lines with text, then the end of the file; empty lines belong to the previous line."""
    starts: list[int] = []
    with readable(path), path.open("rb") as file:
        place = begin(file)
        for line in file:
            if line.strip():
                starts.append(place)
            place += len(line)
    if not starts:
        raise DataError(f"{str(path)!r} holds no text", hint="Give a line per sample")
    return np.asarray([*starts, place], np.int64)


def _line(path: Path, starts: Ints, number: int) -> str:
    with readable(path), path.open("rb") as file:
        file.seek(int(starts[number]))
        data = file.read(int(starts[number + 1] - starts[number]))
    try:
        return data.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise other_encoding(path, int(starts[number]) + error.start) from error


def padded(take: Take, count: int, signature: Signature, ids: Input, tokens: Tokens, source: str) -> Part:
    """Return texts as a part, one sample each, padded to the longest of a batch or to the model's length."""
    texts = Padded(take, tokens)
    columns: dict[str, Column] = {ids.name: TextColumn(texts, "ids", count, ids)}
    for entry in signature:
        role = role_of(entry)
        if role is not None:
            columns[entry.name] = TextColumn(texts, role, count, entry)
    part = from_mapping(columns, signature, source)
    cut = f"{source}: texts are cut after {tokens.length} tokens; --sequence-length sets another number"
    return Part(source=source, arrays=part.arrays, notes=part.notes if tokens.chosen else (*part.notes, cut))


class Padded:
    """Texts as ids, mask and types of equal length; the last batch is cached, since several inputs read it."""

    def __init__(self, take: Take, tokens: Tokens) -> None:
        self.take, self.tokens = take, tokens
        self._last: tuple[bytes, dict[What, Array]] = (b"", {})

    def __call__(self, numbers: Ints) -> dict[What, Array]:
        """Return the arrays of these samples for all roles."""
        key, last = np.asarray(numbers, np.int64).tobytes(), self._last
        if last[0] != key or not last[1]:
            self._last = last = key, self._make(numbers)  # replaced at once: another thread may prepare batches
        return last[1]

    def _make(self, numbers: Ints) -> dict[What, Array]:
        found = [self.tokens.encode(self.take(int(number))) for number in numbers]
        longest = max((len(text.ids) for text in found), default=0)
        shape = len(found), self.tokens.length if self.tokens.fixed else max(longest, 1)
        ids, mask = np.full(shape, self.tokens.pad, np.int64), np.zeros(shape, np.int64)
        types = np.zeros(shape, np.int64)
        for row, text in enumerate(found):
            size = len(text.ids)
            span = slice(shape[1] - size, None) if self.tokens.left else slice(0, size)
            ids[row, span], types[row, span], mask[row, span] = text.ids, text.type_ids, 1
        return {
            "ids": ids,
            "mask": mask,
            "types": types,
            "positions": positions(shape[1], shape[0], ids.dtype, 0, mask),
        }


class TextColumn(Column):
    """The values of one input for texts."""

    def __init__(self, texts: Padded, what: What, count: int, entry: Input) -> None:
        self.texts, self.what, self.entry = texts, what, entry
        # Ids keep the tokenizer's type until they are checked against the model's table.
        super().__init__((count, texts.tokens.length), np.dtype(np.int64) if what == "ids" else entry.dtype)

    def rows(self, numbers: Ints) -> Array:
        """Tokenize these texts."""
        return self.texts(numbers)[self.what].astype(self.dtype)


LINES = Kind(with_suffix(".txt"), from_text, TEXT)
