"""Runs that only round weights to a few bits, and what they lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

import onnxgrail
from tests.e2e import nets

WHOLE: dict[str, Any] = {"ratio": 0, "quantize": "int4"}


def run(path: Path, feed: Any) -> np.ndarray[Any, Any]:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feed)[0], np.float64)


ROWS = nets.vectors(800, 24)["x"]
FEED, FRESH = {"x": ROWS[:400]}, {"x": ROWS[400:]}


def small(path: Path, out: str, **choices: Any) -> tuple[Path, dict[str, Any]]:
    target = path.with_name(out)
    given = {**WHOLE, "data": FEED, "held_out": 0, "force": True, **choices}
    return target, onnxgrail.compress(path, target, **given).report.data


def lost(path: Path, dense: Path) -> float:
    wanted, found = run(dense, FRESH), run(path, FRESH)
    return float(np.square(found - wanted).sum() / np.square(wanted).sum())
