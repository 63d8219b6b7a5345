"""Rows that values choose: the narrowed network sends others through a layer than the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrail
from tests.tiny import tiny

BODY = """
h = MatMul(x, w1)
a = Relu(h)
s = MatMul(a, gate)
t = Squeeze(s, last)
chosen = Greater(t, zero)
rows = Compress<axis=0>(a, chosen)
g = MatMul(rows, w2)
b = Relu(g)
e = MatMul(b, w3)
y = ReduceSum<keepdims=0>(e, first)
rest = MatMul(a, w4)
"""


@pytest.mark.parametrize("above", [0.0, 1e9], ids=["some", "none"])
def test_layers_whose_rows_differ_in_number_stop_no_fit(above: float, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {"w1": (6, 16), "gate": (16, 1), "w2": (16, 12), "w3": (12, 3), "w4": (16, 2)}
    axes = {"last": np.array([-1]), "first": np.array([0]), "zero": np.full(1, above, np.float32)}
    model = tiny("float[N,6] x => float[] y, float[] rest", BODY, {**weights, **axes}, recorded=False)
    source, slim = tmp_path / "m.onnx", tmp_path / "s.onnx"
    ir.save(model, source)
    samples = {"x": rng.standard_normal((24, 6)).astype(np.float32)}
    np.savez(tmp_path / "x.npz", **samples)
    result = onnxgrail.compress(source, slim, unit_ratio=0.5, data=tmp_path / "x.npz")
    assert result.report.data["blocks"]
    y, _ = ort.InferenceSession(slim).run(None, samples)
    assert y.shape == (3,)
    assert np.isfinite(y).all()
