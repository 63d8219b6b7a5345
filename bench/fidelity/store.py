"""The results on disk: one JSON file with one line per cell, written again after every cell."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
LISTS = ("cells", "latency")
Data = dict[str, Any]


def load(path: Path) -> Data:
    """Return the results so far."""
    if not path.exists():
        return {
            "schema": SCHEMA,
            "environment": {},
            "settings": {},
            "skipped": [],
            "subjects": {},
            "cells": [],
            "latency": [],
        }
    data: Data = json.loads(path.read_text(encoding="utf-8"))
    return data


def save(path: Path, data: Mapping[str, Any]) -> None:
    """Write the results, whole or not at all."""
    head = {key: value for key, value in data.items() if key not in LISTS}
    parts = [json.dumps(head, indent=1, allow_nan=False).rstrip().removesuffix("}").rstrip()]
    for name in LISTS:
        rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in data[name])
        parts.append(f' "{name}": [\n{rows}\n ]')
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(",\n".join(parts) + "\n}\n", encoding="utf-8")
    partial.replace(path)


def key(cell: Mapping[str, Any]) -> tuple[str, str, float, int]:
    """Return the key that identifies a cell."""
    return cell["subject"], cell["method"], cell["ratio"], cell["draw"]


def forget(data: Data, subject: str) -> None:
    """Remove all results of a subject, because its model has changed."""
    data["subjects"].pop(subject, None)
    for name in LISTS:
        data[name] = [row for row in data[name] if row["subject"] != subject]


def finite(score: float) -> float | None:
    """Round a score for JSON; None for a ruined model's infinite score."""
    return round(score, 6) if math.isfinite(score) else None
