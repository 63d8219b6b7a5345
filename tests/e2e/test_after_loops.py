"""Layers after a loop are fitted: what the original network computes after it stays known while the run goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.core import Array
from tests.tiny import tiny

LAYERS = """
    a = MatMul(l, w1)
    b = Relu(a)
    c = MatMul(b, w2)
    d = Relu(c)
    e = MatMul(d, w3)
    f = Relu(e)
    y = MatMul(f, w4)
"""
TENSOR = """
    l = Loop (three, yes, x) <
        body = step (int64 i, bool go, float[A,16] now) => (bool on, float[A,16] next) {
            next = Mul(now, half)
            on = Identity(go)
        }
    >"""
SEQUENCE = """
    sizes = Shape(x)
    count = Gather(sizes, zero)
    empty = SequenceEmpty<dtype = 1>()
    rows = Loop (count, yes, empty) <
        body = step (int64 i, bool go, seq(float[A,16]) before) => (bool on, seq(float[A,16]) after) {
            row = Gather(x, i)
            flat = Unsqueeze(row, axis)
            half_row = Mul(flat, half)
            after = SequenceInsert(before, half_row)
            on = Identity(go)
        }
    >
    l = ConcatFromSequence<axis = 0>(rows)"""
WEIGHTS: dict[str, Any] = {
    "w1": (16, 48), "w2": (48, 48), "w3": (48, 48), "w4": (48, 8), "half": np.array(0.5, np.float32),
    "three": np.array(3), "yes": np.array(True), "zero": np.array(0), "axis": np.array([0]),
}  # fmt: skip


def model(loop: str) -> ir.Model:
    return tiny("float[N,16] x => float[N,8] y", loop + LAYERS, WEIGHTS, recorded=False)


@pytest.fixture(scope="module")
def x() -> Array:
    return np.random.default_rng(0).normal(size=(96, 16)).astype(np.float32)


@pytest.mark.parametrize("loop", [TENSOR, SEQUENCE], ids=["tensor", "sequence"])
@pytest.mark.parametrize("choices", [{"ratio": 0.3}, {"ratio": 0.3, "compensate": "grail"}, {"max_loss": 0.2}])
def test_layers_after_a_loop_are_fitted(loop: str, choices: dict[str, Any], x: Array) -> None:
    report = onnxgrail.compress(model(loop), data={"x": x}, minimize="params", **choices).report.data
    assert sum(block["kept"] < block["units"] for block in report["blocks"]) >= 1
