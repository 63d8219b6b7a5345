"""Reducers by name. To add a reducer: one file with a frozen dataclass, and one line in `registry.REDUCERS`."""

from __future__ import annotations

from collections.abc import MutableMapping

from onnxgrail import registry
from onnxgrail.algebra.reducers.factory import ReducerFactory

REDUCERS: MutableMapping[str, ReducerFactory] = registry.REDUCERS
