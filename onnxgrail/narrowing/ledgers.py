"""Converts between ledgers and records, for steps after the blocks, which write arrays and shifts only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.graph.io.mapped import in_files, shelved
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.steps.codec import Record

ARRAY, SHIFT = "array ", "shift "


def of_addition(before: Ledger, after: Ledger, notes: Mapping[str, Any]) -> Record:
    """Return the arrays and shifts that `after` adds to `before`, with notes."""
    arrays = _fresh(ARRAY, before.arrays, after.arrays) | _fresh(SHIFT, before.shifts, after.shifts)
    return Record(arrays=arrays, notes=notes)


def with_addition(ledger: Ledger, record: Record, model: ir.Model) -> Ledger:
    """Return a ledger with the additions of a record, moved into files if the model's own weights are in files."""
    arrays = _named(ARRAY, record.arrays)
    if in_files(model):
        arrays = {name: shelved(array) for name, array in arrays.items()}
    return dataclasses.replace(
        ledger,
        arrays={**ledger.arrays, **arrays},
        shifts={**ledger.shifts, **_named(SHIFT, record.arrays)},
    )


def _fresh(kind: str, before: Mapping[str, Array], after: Mapping[str, Array]) -> dict[str, Array]:
    return {f"{kind}{name}": array for name, array in after.items() if before.get(name) is not array}


def _named(kind: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name.removeprefix(kind): array for name, array in arrays.items() if name.startswith(kind)}
