"""Describe the environment and the calibration data of a run for its report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.machine.extras import version_of
from onnxgrail.machine.plain import plain


def calibration_entry(batches: Batches) -> dict[str, Any]:
    """Return the report's entry on the calibration data."""
    return {name: plain(getattr(batches, name)) for name in ("source", "samples", "synthetic", "notes")}


def environment(*, providers: Sequence[str], threads: int | None) -> dict[str, Any]:
    """Return the versions and settings that the numbers depend on."""
    return {
        "python": sys.version.split()[0],
        "onnx": version_of("onnx"),
        "onnxruntime": version_of("onnxruntime") or version_of("onnxruntime-gpu"),
        "numpy": version_of("numpy"),
        "providers": list(providers),
        "threads": threads,
    }
