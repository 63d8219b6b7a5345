"""Layers whose weight has no numbers, as tools leave them where all outputs were cut away, or is a vector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrail
from tests.tiny import tiny


@pytest.mark.parametrize("choices", [{"quantize": "int8", "qdq": True}, {"quantize": "int8-dynamic"}])
@pytest.mark.parametrize("shape", [(64, 0), (64,)], ids=["empty", "vector"])
def test_other_layers_get_8_bits(choices: dict[str, Any], shape: tuple[int, ...], tmp_path: Path) -> None:
    weights = {"v": (16, 64), "w": (64, 8), "none": np.ones(shape, np.float32)}
    body = "a = MatMul(x, v)\nb = Relu(a)\ny = MatMul(b, w)\nz = MatMul(b, none)"
    signature = f"float[N,16] x => float[N,8] y, float[{', '.join(['N', *map(str, shape[1:])])}] z"
    onnx.save(ir.to_proto(tiny(signature, body, weights)), tmp_path / "m.onnx")
    data = {"x": np.random.default_rng(0).standard_normal((24, 16)).astype(np.float32)}
    onnxgrail.compress(tmp_path / "m.onnx", tmp_path / "o.onnx", data=data, ratio=0, held_out=0, **choices)
    found = {tensor.name.split("_quantized")[0] for tensor in onnx.load(tmp_path / "o.onnx").graph.initializer}
    assert {"v", "w", "none"} <= found
    ort.InferenceSession(tmp_path / "o.onnx").run(None, {"x": data["x"]})
