"""A second runtime reads what is written: OpenVINO, in single precision, computes what ONNX Runtime computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.runtime.session import open_session

openvino = pytest.importorskip("openvino", reason="openvino is not installed: extra `test` has it")

BATCH = 4
FAST: dict[str, Any] = {"unit_ratio": 0.3, "samples": 32, "compensate": "grail", "check": False}


def both(path: Path, feed: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs by name from ONNX Runtime and from OpenVINO."""
    with open_session(path) as session:
        one = session.run(feed)
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = compiled(feed)
    return one, {name: found[name] for name in one}


def feed_of(embedded: Any) -> dict[str, Any]:
    with np.load(embedded.heldout) as file:
        return {name: file[name][:BATCH] for name in file.files if name != "labels"}


@pytest.mark.parametrize("name", ["digits_resnet", "digits_vit", "char_llama"])
def test_narrowed_models_compute_the_same(name: str, tmp_path: Path) -> None:
    embedded = models.load(name)
    path = tmp_path / "small.onnx"
    result = onnxgrail.compress(embedded.model, path, data=embedded.calibration, **{**FAST, "unit_ratio": 0.5})
    assert result.report.data["model"]["params_after"] < 0.7 * result.report.data["model"]["params_before"]
    one, two = both(path, feed_of(embedded))
    for output, array in one.items():
        assert two[output].shape == array.shape
        np.testing.assert_allclose(two[output], array, rtol=1e-3, atol=1e-3 * np.abs(array).max())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("digits_resnet", "int8"),
        ("digits_resnet", "fp16"),
        ("digits_vit", "int8-dynamic"),
        ("digits_vit", "fp16"),
        ("char_llama", "int8-dynamic"),
        ("char_llama", "fp16"),
    ],
)
def test_quantised_models_are_read(name: str, kind: str, tmp_path: Path) -> None:
    embedded = models.load(name)
    path = tmp_path / "small.onnx"
    onnxgrail.compress(embedded.model, path, quantize=kind, data=embedded.calibration, **FAST)
    one, two = both(path, feed_of(embedded))
    assert np.mean(two["logits"].argmax(-1) == one["logits"].argmax(-1)) > 0.98
    np.testing.assert_allclose(two["logits"], one["logits"], atol=0.05 * np.abs(one["logits"]).max())
