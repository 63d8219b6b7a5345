"""`--quantize int4` and `int8-weights`: the smallest weights keep 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from tests.tiny import tiny

SIGNATURE = "float[N,1,16,16] x => float[N,1,16,16] y"
BODY = """
    a = Conv<pads = [1, 1, 1, 1]>(x, first, shift)
    b = Relu(a)
    c = Conv<pads = [1, 1, 1, 1]>(b, w1)
    d = Relu(c)
    e = Conv<pads = [1, 1, 1, 1]>(d, w2)
    f = Relu(e)
    g = Conv(f, w3)
    y = Conv<pads = [1, 1, 1, 1]>(g, last)
"""
WEIGHTS: dict[str, Any] = {
    "first": (16, 1, 3, 3), "shift": (16,), "w1": (128, 16, 3, 3), "w2": (128, 128, 3, 3), "w3": (16, 128, 1, 1),
    "last": (1, 16, 3, 3),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "bits"), [("int4", 4), ("int8-weights", 8)])
def test_the_smallest_weights_keep_16_bits(tmp_path: Path, kind: str, bits: int) -> None:
    """They cost little, and can matter much: the last layer of a denoiser takes the difference of large numbers."""
    path, out, rng = tmp_path / "m.onnx", tmp_path / "o.onnx", np.random.default_rng(1)
    onnx.save(ir.to_proto(tiny(SIGNATURE, BODY, WEIGHTS, recorded=False)), path)
    data: dict[str, Any] = {"x": rng.normal(size=(64, 1, 16, 16)).astype(np.float32)}
    report = onnxgrail.compress(path, out, data=data, ratio=0, quantize=kind, held_out=0).report.data
    found = {one["weight"]: one["bits"] for one in report["quantization"]["matrices"]}
    assert {name: found[name] for name in ("first", "w1", "w2", "last")} == {
        "first": 16, "w1": bits, "w2": bits, "last": 16,
    }  # fmt: skip
    assert out.stat().st_size < (0.05 + bits / 32) * path.stat().st_size
