"""Layers whose weight has no numbers, as tools leave them where all outputs were cut away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from tests.tiny import tiny


@pytest.mark.parametrize("choices", [{"quantize": "int8", "qdq": True}, {"quantize": "int8-dynamic"}])
def test_other_layers_get_8_bits(choices: dict[str, Any], tmp_path: Path) -> None:
    weights = {"v": (16, 64), "w": (64, 8), "none": np.zeros((64, 0), np.float32)}
    body = "a = MatMul(x, v)\nb = Relu(a)\ny = MatMul(b, w)\nz = MatMul(b, none)"
    signature = "float[N,16] x => float[N,8] y, float[N,0] z"
    onnx.save(ir.to_proto(tiny(signature, body, weights)), tmp_path / "m.onnx")
    data = {"x": np.random.default_rng(0).standard_normal((24, 16)).astype(np.float32)}
    onnxgrail.compress(tmp_path / "m.onnx", tmp_path / "o.onnx", data=data, ratio=0, held_out=0, **choices)
    found = {tensor.name.split("_quantized")[0] for tensor in onnx.load(tmp_path / "o.onnx").graph.initializer}
    assert {"v", "w", "none"} <= found
