"""The metric functions of docs/metric.md for detectors of Ultralytics, on boxes whose losses are known."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.furniture import metric

SIDE = 20.0


@pytest.fixture
def ultra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name in ("yolo.py", "ultra.py"):
        metric(tmp_path / name)
    monkeypatch.syspath_prepend(tmp_path)
    import importlib

    yield importlib.import_module("ultra")
    for name in ("yolo", "ultra"):
        sys.modules.pop(name, None)


def output(*boxes: tuple[float, int, float]) -> np.ndarray[Any, Any]:
    """One image with boxes at places of their own: (center, class of 3, score); the other places are empty."""
    found = np.zeros((7, 12), np.float32)
    for place, (center, kind, score) in enumerate(boxes):
        found[:4, place] = center, center, SIDE, SIDE
        found[4 + kind, place] = score
    return found


def outputs(*images: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {"output0": np.stack(images)}


TRUTH = outputs(output((50, 0, 0.9), (100, 0, 0.8), (150, 2, 0.7)), output((50, 2, 0.9)), output())


def test_the_original_loses_nothing(ultra: ModuleType) -> None:
    assert ultra.loss(TRUTH, TRUTH, None) == [0, 0, 0]
    assert ultra.map50(TRUTH, TRUTH, None) == 0
    nothing = outputs(output())
    assert ultra.map50(nothing, nothing, None) == 0


def test_boxes_that_are_missing_or_moved_count(ultra: ModuleType) -> None:
    found = outputs(output((51, 0, 0.9), (150, 2, 0.7)), output((80, 2, 0.9)), output())
    assert ultra.loss(TRUTH, found, None) == pytest.approx([1 - 2 * 2 / 5, 1, 0])
    # class 0: one of two found; class 2: the false box has the higher score, then one of two at a precision of a half
    assert ultra.map50(TRUTH, found, None) == pytest.approx(1 - (0.5 + 0.25) / 2)


def test_suppressed_boxes_do_not_count(ultra: ModuleType) -> None:
    found = outputs(
        output((50, 0, 0.9), (51, 0, 0.6), (100, 0, 0.8), (150, 2, 0.7)), output((50, 2, 0.9), (50, 1, 0.1)), output()
    )
    assert ultra.loss(TRUTH, found, None) == [0, 0, 0]
    assert ultra.map50(TRUTH, found, None) == 0
