"""The loss that a search states is that of the file, measured on the samples that judged the candidates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import onnxgrail
from onnxgrail import models

DIGITS = models.load("digits_resnet")
CLOSE = {"float": 1e-4, "int8": 2e-3}  # fits that differ in the last bit round a few weights to another number


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The digits model, and the same with weights of 8 bits, of which fits choose the rounding."""
    path = tmp_path_factory.mktemp("models") / "int8.onnx"
    onnxgrail.compress(DIGITS.model, path, data=DIGITS.calibration, ratio=0.0, quantize="int8-weights", check=False)
    return {"float": DIGITS.model, "int8": path}


@pytest.mark.parametrize("bits", ["float", "int8"])
def test_the_loss_of_the_candidate_is_that_of_the_file(bits: str, sources: dict[str, Path], tmp_path: Path) -> None:
    model, held = sources[bits], DIGITS.heldout
    options: dict[str, Any] = {"max_loss": 0.01, "minimize": "macs", "latency": False}
    result = onnxgrail.compress(model, tmp_path / "m.onnx", data=DIGITS.calibration, held_out=held, **options)
    search = result.report.data["allocation"]["search"]
    said = search["tried"][search["chosen"]]["loss"]
    found = onnxgrail.compare(model, result.model, data=held, max_loss=0.01)
    assert found.loss is not None
    assert said["mean"] == pytest.approx(found.loss.mean, rel=CLOSE[bits])
    assert said["bound"] == pytest.approx(found.loss.bound, rel=CLOSE[bits])
    assert found.gates_passed
