"""The embedded image model: what a repair is worth where dropping channels alone ruins the network."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import open_session

DIGITS = models.load("digits_resnet")


def accuracy(path: Path) -> float:
    with open_session(path) as session:
        return models.score(DIGITS, lambda feed: list(session.run(feed).values()))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The conv blocks halved, by compensation and reducer."""
    folder = tmp_path_factory.mktemp("digits")
    found = {}
    for name, choices in {
        "none": {"compensate": "none"},
        "grail": {"selector": "wanda", "compensate": "grail"},
        "fold, none": {"reducer": "fold", "compensate": "none"},
        "fold, grail": {"reducer": "fold", "compensate": "grail"},
        "fold-gram, none": {"reducer": "fold-gram", "compensate": "none"},
        "obs, grail": {"selector": "obs", "compensate": "grail"},
    }.items():
        target = folder / f"{name}.onnx"
        result = onnxgrail.compress(
            DIGITS.model, target, data=DIGITS.calibration, unit_ratio=0.5, blocks=("conv",), **choices
        )
        found[name] = (result.report.data, accuracy(target))
    return found


def test_blocks_are_those_of_the_manifest() -> None:
    expected = models.manifest()["digits_resnet"]["blocks"]
    assert Counter(b["kind"] for b in onnxgrail.inspect(DIGITS.model).blocks) == expected


def test_all_conv_blocks_are_halved(results: dict[str, Any]) -> None:
    for data, _ in results.values():
        halves = [(b["units"], b["kept"]) for b in data["blocks"] if b["kind"] == "conv"]
        assert halves == [(32, 16), (64, 32), (96, 48)]
        assert all(b["kept"] == b["units"] for b in data["blocks"] if b["kind"] == "stream")
        assert data["model"]["achieved_ratio"] > 0.4
        assert not data["calibration"] or not data["calibration"]["synthetic"]


def test_grail_repairs_what_pruning_broke(results: dict[str, Any]) -> None:
    assert results["grail"][1] > results["none"][1] + 0.3
    assert results["grail"][1] > 0.85


def test_grail_repairs_what_folding_broke(results: dict[str, Any]) -> None:
    assert results["fold, grail"][1] > results["fold, none"][1] + 0.1


def test_folding_what_acts_alike_needs_less_repair(results: dict[str, Any]) -> None:
    assert results["fold-gram, none"][1] > results["fold, none"][1] + 0.3


def test_choosing_what_can_be_repaired_pays(results: dict[str, Any]) -> None:
    assert results["obs, grail"][1] > results["grail"][1] + 0.01


def test_the_report_tells_the_same(results: dict[str, Any]) -> None:
    cosines = {name: data["verification"]["outputs"][0]["cosine"] for name, (data, _) in results.items()}
    assert cosines["grail"] > cosines["none"] + 0.3
    for block in results["grail"][0]["blocks"]:
        if block["kind"] == "conv":
            assert block["outcome"]["status"] == "ok"
            assert block["error"]["compensated"] < 0.5 * block["error"]["plain"]
