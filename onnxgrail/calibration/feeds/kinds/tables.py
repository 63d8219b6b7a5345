"""Readers of tables in one file: lines of JSON objects, and Parquet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from onnxgrail.calibration.feeds.kinds.columns import library
from onnxgrail.calibration.feeds.kinds.datasets import of_table
from onnxgrail.calibration.feeds.kinds.kind import SCALE, TEXT, Kind, with_suffix
from onnxgrail.calibration.feeds.parts import Part, readable
from onnxgrail.calibration.feeds.reading import Reading
from onnxgrail.calibration.feeds.signature import Signature
from onnxgrail.errors import DataError

LONGEST = 2**26  # bytes of a line of JSON


def from_table(
    load: Callable[[Path], Any], path: Path, signature: Signature, reading: Reading, _: int | None
) -> tuple[Part, ...]:
    """Read a file of rows with named columns; see `datasets.from_dataset`.

    Args:
        load: reads the file as a pyarrow table.
        path: the file.
        signature: the model's inputs.
        reading: the user's settings.

    Raises:
        DataError: the file is broken or has no rows, or no column feeds the model.
        MissingExtraError: pyarrow, or a package for a column, is not installed.
    """
    library()
    with readable(path):
        table = load(path)
        table.validate(full=True)  # offsets of a broken file could point outside of it
    if not table.num_rows:
        raise DataError(f"{str(path)!r} holds no samples", hint="Give one row per sample")
    return (of_table(table, signature, reading, path.name),)


def _lines(path: Path) -> Any:
    """Load a file with a JSON object per line, whose keys are columns."""
    from pyarrow import json

    return json.read_json(path, json.ReadOptions(block_size=LONGEST))


def _parquet(path: Path) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(path).read()


LINES = Kind(with_suffix(".jsonl"), partial(from_table, _lines), SCALE | TEXT)
PARQUET = Kind(with_suffix(".parquet"), partial(from_table, _parquet), SCALE | TEXT)
