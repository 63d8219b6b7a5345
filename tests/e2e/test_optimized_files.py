"""Files that ONNX Runtime has optimized for a machine are quantized: their blocked layers stay in float."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxgrail
from onnxgrail.graph.io.serial import to_bytes
from tests.tiny import tiny

BLOCKED = "com.microsoft.nchwc"
BODY = """
    a = Conv<pads = [1, 1, 1, 1]>(x, w0, b0)
    r = Relu(a)
    c = Conv<pads = [1, 1, 1, 1]>(r, w1, b1)
    p = Relu(c)
    f = Flatten(p)
    y = Gemm(f, w2, b2)
"""
WEIGHTS = {"w0": (64, 32, 3, 3), "b0": (64,), "w1": (64, 64, 3, 3), "b1": (64,), "w2": (1024, 40), "b2": (40,)}


def optimized(path: Path, body: str = BODY) -> Path:
    """A file with the blocked layout of this machine."""
    model = tiny("float[N,32,4,4] x => float[] y", body, {name: WEIGHTS[name] for name in WEIGHTS if name in body})
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 4
    ort.InferenceSession(to_bytes(model), options, providers=["CPUExecutionProvider"])
    if not any(node.domain == BLOCKED for node in onnx.load(path).graph.node):
        pytest.skip("ONNX Runtime has no blocked layout on this machine")
    return path


@pytest.mark.parametrize("options", [{}, {"qdq": True}, {"target": "tensorrt"}])
def test_blocked_layers_stay_in_float(options: dict[str, object], tmp_path: Path) -> None:
    given = optimized(tmp_path / "given.onnx")
    data = {"x": np.random.default_rng(0).normal(size=(16, 32, 4, 4)).astype(np.float32)}
    result = onnxgrail.compress(given, tmp_path / "small.onnx", data=data, ratio=0, quantize="int8", **options)
    written = onnx.load(tmp_path / "small.onnx")
    assert sum(node.domain == BLOCKED and node.op_type == "Conv" for node in written.graph.node) == 2
    (output,) = onnxgrail.compare(given, tmp_path / "small.onnx", data=data).outputs
    assert output.nmse < 1e-2
    assert result.report.data["quantization"]["bytes_after"] < given.stat().st_size


def test_a_file_of_another_processor_says_so(tmp_path: Path) -> None:
    model = onnx.load(optimized(tmp_path / "given.onnx", BODY.partition("f = ")[0] + "y = Sigmoid(p)"))
    last = next(node for node in model.graph.node if node.op_type == "ReorderOutput")
    next(a for a in last.attribute if a.name == "channels").i = 72  # as if blocks were longer
    data = {"x": np.zeros((16, 32, 4, 4), np.float32)}
    with pytest.raises(onnxgrail.ModelError, match="optimized this file for one processor"):
        onnxgrail.compress(model, data=data, ratio=0.3)
