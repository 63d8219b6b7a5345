"""Conversion to plain data that JSON can hold."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = 1


def plain(value: Any) -> Any:
    """Return nested data as JSON types: numpy scalars and arrays, tuples, paths, NaN and infinity are replaced."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        simple = set(map(type, value)) <= {int, str}  # fast path for the long lists: unit numbers and names
        return list(value) if simple else [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def to_json(data: Any) -> str:
    """Return data as indented JSON."""
    return json.dumps(plain(data), indent=1, allow_nan=False)


class Plain:
    """A result that converts to plain data."""

    __slots__ = ()

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        found: dict[str, Any] = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {"schema": SCHEMA} | found

    def to_json(self) -> str:
        """Return indented JSON; NaN and infinity become null."""
        return to_json(self.to_data())
