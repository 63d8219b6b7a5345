"""Readers of tables in one file: lines of JSON objects, and Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnxgrail.calibration.feeds.kinds.datasets import library, of_table
from onnxgrail.calibration.feeds.kinds.kind import SCALE, TEXT, Kind, with_suffix
from onnxgrail.calibration.feeds.parts import Part, readable
from onnxgrail.calibration.feeds.reading import Reading
from onnxgrail.calibration.feeds.signature import Signature
from onnxgrail.errors import DataError

LONGEST = 2**26  # bytes of a line of JSON


def from_lines(path: Path, signature: Signature, reading: Reading, _: int | None) -> tuple[Part, ...]:
    """Read a file with a JSON object per line, whose keys are columns; see `datasets.from_dataset`.

    Raises:
        DataError: the file is broken, or no column feeds the model.
        MissingExtraError: pyarrow, or a package for a column, is not installed.
    """
    library()
    from pyarrow import json

    with readable(path):
        table = json.read_json(path, json.ReadOptions(block_size=LONGEST))
    return _made(path, table, signature, reading)


def from_parquet(path: Path, signature: Signature, reading: Reading, _: int | None) -> tuple[Part, ...]:
    """Read a Parquet file; see `datasets.from_dataset`.

    Raises:
        DataError: the file is broken, or no column feeds the model.
        MissingExtraError: pyarrow, or a package for a column, is not installed.
    """
    library()
    from pyarrow import parquet

    with readable(path):
        table = parquet.ParquetFile(path).read()
    return _made(path, table, signature, reading)


def _made(path: Path, table: Any, signature: Signature, reading: Reading) -> tuple[Part, ...]:
    with readable(path):
        table.validate(full=True)  # offsets of a broken file could point outside of it
    if not table.num_rows:
        raise DataError(f"{str(path)!r} holds no samples", hint="Give one row per sample")
    return (of_table(table, signature, reading, path.name),)


LINES = Kind(with_suffix(".jsonl"), from_lines, SCALE | TEXT)
PARQUET = Kind(with_suffix(".parquet"), from_parquet, SCALE | TEXT)
