"""Readers of Hugging Face datasets written by `save_to_disk`: Arrow files, memory-mapped and read row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.calibration.feeds.kinds.columns import Lengths, Numbers, leaf_of, library, plain
from onnxgrail.calibration.feeds.kinds.images import images
from onnxgrail.calibration.feeds.kinds.kind import SCALE, TEXT, Kind
from onnxgrail.calibration.feeds.kinds.passages import Passages, joined, passages
from onnxgrail.calibration.feeds.kinds.text import WHERE, Tokens, ids_input, padded
from onnxgrail.calibration.feeds.matching import from_mapping, role_of
from onnxgrail.calibration.feeds.parts import Part, readable
from onnxgrail.calibration.feeds.reading import Reading
from onnxgrail.calibration.feeds.signature import Signature, describe
from onnxgrail.core import Labels
from onnxgrail.errors import DataError
from onnxgrail.fidelity.goals import UNKNOWN
from onnxgrail.machine.files.unchanged import SteadyFile

STATE, SPLITS = "state.json", "dataset_dict.json"
PREFERRED = "train"
LABELS = ("labels", "label")
MAPPED_FROM = 2**28  # bytes; smaller files are read, since truncation of a mapped file crashes the process
MOST = 2**26  # bytes of text that are cut into passages
SAVED = "Save it again with Dataset.save_to_disk"


def is_dataset(folder: Path) -> bool:
    """Return True if a folder was written by `save_to_disk`."""
    return folder.is_dir() and any((folder / name).is_file() for name in (STATE, SPLITS))


def from_dataset(folder: Path, signature: Signature, reading: Reading, _: int | None) -> tuple[Part, ...]:
    """Read columns with the names of inputs; else a column of images, or of texts with a tokenizer.

    Raises:
        DataError: files are broken or missing, or no column feeds the model.
        MissingExtraError: pyarrow, or a package for a column, is not installed.
    """
    folder, notes = _split(folder)
    table, files = _table(folder)
    if not table.num_rows:
        raise DataError(f"{str(folder)!r} holds no samples", hint="Save another split")
    part = of_table(table, signature, reading, folder.name)
    return (replace(part, notes=(*notes, *part.notes), files=files),)


def of_table(table: Any, signature: Signature, reading: Reading, source: str) -> Part:
    """Return a table as a part; see `from_dataset`.

    Args:
        table: a pyarrow table.
        signature: the model's inputs.
        reading: the user's settings.
        source: name of the data in messages.

    Raises:
        DataError: no column feeds the model.
        MissingExtraError: a package for a column is not installed.
    """
    table, notes = _without_empty(table, reading, source)
    part = _part(table, signature, reading, source)
    in_rows = not any(isinstance(column, Passages) for column in part.arrays.values())
    free = in_rows and not any(entry.name in LABELS for entry in signature)
    labels = (_labels(table) or part.labels) if free else None
    return replace(part, labels=labels, notes=(*notes, *part.notes))


def _without_empty(table: Any, reading: Reading, source: str) -> tuple[Any, tuple[str, ...]]:
    """Return a table without rows whose text is missing or empty, as empty lines of a file are, and a note on them."""
    names = [] if reading.tokenizer is None else _texts_of({f.name: plain(f.type) for f in table.schema})
    if len(names) != 1:
        return table, ()
    from pyarrow import compute

    there = compute.fill_null(compute.not_equal(compute.utf8_trim_whitespace(table.column(names[0])), ""), False)
    kept = table.filter(there)
    gone = table.num_rows - kept.num_rows
    if not kept.num_rows:
        raise DataError(f"{source}: no row has a text in {names[0]!r}", hint="Give one text per row")
    return kept, () if not gone else (f"{source}: {gone} rows without a text are left out",)


def _labels(table: Any) -> Labels | None:
    """Return the column of integer labels; None if there is none."""
    name = next((name for name in LABELS if name in table.column_names), None)
    column = None if name is None else table.column(name)
    if column is None or column.null_count or not library().types.is_integer(plain(column.type)):
        return None
    with readable(name):
        return Labels(values=np.asarray(column.to_numpy()))


def _part(table: Any, signature: Signature, reading: Reading, source: str) -> Part:
    arrow = library()
    kinds = {name: plain(table.schema.field(name).type) for name in table.column_names}
    pictures = [name for name, kind in kinds.items() if _is_picture(kind)]
    if len(pictures) == 1 and len(signature) == 1 and signature[0].name not in kinds:
        column = table.column(pictures[0])
        made, notes = images(
            lambda number: _bytes(column, number, f"{source}, {pictures[0]!r}"),
            table.num_rows,
            signature[0],
            reading,
            source,
        )
        return Part(source=source, arrays={signature[0].name: made}, notes=notes)
    if reading.tokenizer is not None and (_strings(kinds) or not kinds.keys() & {entry.name for entry in signature}):
        return _texts(table, kinds, signature, reading, source)
    wanted = {entry.name: entry for entry in signature}
    numeric: dict[str, Any] = {}
    for name, kind in kinds.items():
        depth, leaf = leaf_of(kind)
        words = name in wanted and wanted[name].dtype.kind == "O" and _is_text(leaf)
        if words or arrow.types.is_integer(leaf) or arrow.types.is_floating(leaf) or arrow.types.is_boolean(leaf):
            numeric[name] = Numbers(table.column(name), depth, leaf, wanted.get(name), reading, f"{source}, {name!r}")
            numeric[name].pad = UNKNOWN if name in LABELS and arrow.types.is_signed_integer(leaf) else 0
    strings = _strings(kinds)
    if strings and not set(numeric) & set(wanted) and any(e.dtype.kind in "iu" for e in signature):
        raise DataError(
            f"{source}: no column is called like an input, and the texts {strings[0]!r} need a tokenizer; "
            f"the model takes: {describe(signature)}",
            hint=f"Give --tokenizer FILE ({WHERE})",
        )
    rounded = [name for name, column in numeric.items() if column.rounded]
    notes = tuple(f"{source}: column {name!r} is rounded from float64 to float32" for name in rounded)
    ragged = next((c for c in numeric.values() if c.ragged), None)
    notes += () if ragged is None else _lengths(numeric, ragged, signature, source)
    part = from_mapping(numeric, signature, source, spare=True)
    return replace(part, notes=(*notes, *part.notes))


def _lengths(numeric: dict[str, Any], ragged: Numbers, signature: Signature, source: str) -> tuple[str, ...]:
    """Add the mask of rows of different lengths if the data have none; return notes.

    Raises:
        DataError: the model has no mask, so padding would count as text.
    """
    masks = [entry for entry in signature if role_of(entry) == "mask"]
    if not masks:
        raise DataError(
            f"{source}: rows have different lengths, and the model has no attention mask: {describe(signature)}",
            hint="Save rows of one length",
        )
    notes = []
    for entry in masks:
        if entry.name not in numeric:
            numeric[entry.name] = Lengths(ragged, entry)
            notes.append(f"{source}: no array for input {entry.name!r}, filled with the lengths of the rows")
    return tuple(notes)


def _strings(kinds: Mapping[str, Any]) -> list[str]:
    """Return the names of text columns."""
    return [name for name, kind in kinds.items() if _is_text(kind)]


def _is_text(kind: Any) -> bool:
    types = library().types
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _texts_of(kinds: Mapping[str, Any]) -> list[str]:
    """Return the names of columns that a tokenizer may read: the one called `text`, else all text columns."""
    named = _strings(kinds)
    return ["text"] if "text" in named else named


def _texts(table: Any, kinds: Mapping[str, Any], signature: Signature, reading: Reading, source: str) -> Part:
    names = _texts_of(kinds)
    if len(names) != 1:
        raise DataError(
            f"{source}: --tokenizer needs one column of texts, found {', '.join(map(repr, names)) or 'none'}",
            hint="Keep one, or call it 'text'",
        )
    ids = ids_input(signature, source)
    column = table.column(names[0])
    tokens = Tokens.of(signature, ids, reading, source)
    if not any(role_of(entry) == "mask" for entry in signature):
        return passages(joined(_some(column), source), signature, ids, tokens)
    return padded(lambda number: str(column[number].as_py()), table.num_rows, signature, ids, tokens, source)


def _some(column: Any) -> Iterator[str]:
    """Yield the texts of a column, or of a long one as many as `MOST` bytes hold, equally spaced."""
    from pyarrow import compute

    step = max(1, -(-(compute.sum(compute.binary_length(column)).as_py() or 0) // MOST))
    return (str(column[number].as_py()) for number in range(0, len(column), step))


# --------------------------------------------------------------------------------------------------------------- files


def _json(path: Path) -> dict[str, Any]:
    with readable(path):
        found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise DataError(f"{str(path)!r} is not what save_to_disk writes", hint=SAVED)
    return found


def _split(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the folder of a split, and a note if there are several."""
    if not (folder / SPLITS).is_file():
        return folder, ()
    names = _json(folder / SPLITS).get("splits")
    if not isinstance(names, list) or not names or not all(_is_name(name) for name in names):
        raise DataError(f"{str(folder / SPLITS)!r} names no splits", hint=SAVED)
    name = PREFERRED if PREFERRED in names else names[0]
    note = f"{folder.name}: taken split {name!r} of {', '.join(names)}; its folder names another"
    return folder / name, (note,) if len(names) > 1 else ()


def _is_name(name: object) -> bool:
    """Return True if a file name does not leave its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0:")


def _table(folder: Path) -> tuple[Any, tuple[SteadyFile, ...]]:
    """Read all Arrow files of a split as a table; return it with the large files, which are memory-mapped.

    Raises:
        DataError: a file is missing, broken or outside the folder, or a file of indices reorders the rows.
    """
    arrow, state = library(), _json(folder / STATE)
    files = state.get("_data_files")
    names = [str(f.get("filename")) for f in files if isinstance(f, dict)] if isinstance(files, list) else []
    if files == []:
        raise DataError(f"{str(folder)!r} holds no samples", hint="Save another split")
    if not names or not all(_is_name(name) for name in names):
        raise DataError(f"{str(folder / STATE)!r} names no files in its folder", hint=SAVED)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(f"{str(folder)!r} has an index over its rows", hint="Call flatten_indices() before it is saved")
    tables, mapped = [], list[SteadyFile]()
    for path in (folder / name for name in names):
        with readable(path):
            if path.stat().st_size < MAPPED_FROM:
                source = arrow.py_buffer(path.read_bytes())
            else:
                mapped.append(SteadyFile(path, DataError))
                source = arrow.memory_map(str(path))
            tables.append(arrow.ipc.open_stream(source).read_all())
    with readable(folder):
        table = arrow.concat_tables(tables)
        table.validate(full=True)  # offsets of a broken file could point outside of it
        return table, tuple(mapped)


def _is_picture(kind: Any) -> bool:
    types = library().types
    return bool(types.is_struct(kind)) and {kind.field(i).name for i in range(kind.num_fields)} == {"bytes", "path"}


def _bytes(column: Any, number: int, source: str) -> bytes:
    """Return the file contents of an image; paths to other files are not followed."""
    found = column[number].as_py()
    data = found.get("bytes") if found else None
    if not isinstance(data, bytes):
        raise DataError(f"{source}, row {number}: no image inside the data set", hint="Save it with embedded files")
    return data


DATASET = Kind(is_dataset, from_dataset, SCALE | TEXT)
