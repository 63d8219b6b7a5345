"""Weights that a loop carries from step to step, or that a branch takes apart, get fewer bits, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from tests.tiny import tiny

RNG = np.random.default_rng(0)
LOOP = """
    h = MatMul(x, w)
    y, left = Loop(n, , h, w)<body = b (int64 i, bool c, float[N,64] s, float[64,64] v)
        => (bool d, float[N,64] t, {0}) {{
        d = Identity(c)
        m = MatMul(s, v)
        t = Tanh(m)
        {1}
    }}>
"""
BRANCH = """
    y = If(slow)<
        then_branch = a () => (t) {
            zero = Constant<value_ints = [0]>()
            half = Constant<value_ints = [96]>()
            end = Constant<value_ints = [192]>()
            first = Slice(w, zero, half, zero)
            second = Slice(w, half, end, zero)
            v = Concat<axis = 0>(second, first)
            k = Unsqueeze(v, zero)
            t, t1 = GRU<hidden_size = 64>(x, k, r)
        },
        else_branch = b () => (e) { e, e1 = GRU<hidden_size = 64>(x, q, r) }
    >
"""
FLAG = {"slow": np.array(True)}


def carried(end: str, last: str) -> ir.Model:
    """A model that multiplies by one matrix in every step."""
    body = LOOP.format(end, last)
    return tiny("float[N,64] x => float[] y", body, {"w": (64, 64), "n": np.array(3)}, recorded=False)


MODELS: dict[str, tuple[ir.Model, dict[str, Any]]] = {
    "handed on": (carried("v", ""), {}),
    "copied": (carried("float[64,64] z", "z = Identity(v)"), {}),
    "branch": (
        tiny(
            "float[3,N,64] x, bool slow => float[] y",
            BRANCH,
            {"w": (192, 64), "q": (1, 192, 64), "r": (1, 192, 64)},
            recorded=False,
        ),
        FLAG,
    ),
}


def data_of(name: str) -> list[dict[str, Any]]:
    """Eight samples."""
    _, more = MODELS[name]
    shape = (3, 1, 64) if more else (1, 64)
    return [{"x": RNG.normal(size=shape).astype(np.float32), **more} for _ in range(8)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "choices", [{"target_size": "50%", "only_bits": True}, {"ratio": 0, "quantize": "int8-weights"}]
)
def test_they_have_8_bits(name: str, choices: dict[str, Any], tmp_path: Path) -> None:
    model, data = MODELS[name][0], data_of(name)
    ir.save(model, tmp_path / "a.onnx")
    onnxgrail.compress(tmp_path / "a.onnx", tmp_path / "b.onnx", data=data, batch_size=1, **choices)
    assert (tmp_path / "b.onnx").stat().st_size < 0.5 * (tmp_path / "a.onnx").stat().st_size
    (output,) = onnxgrail.compare(tmp_path / "a.onnx", tmp_path / "b.onnx", data=data).outputs
    assert output.nmse < 1e-3


def test_a_weight_that_a_loop_changes_keeps_its_numbers(tmp_path: Path) -> None:
    ir.save(carried("float[64,64] z", "z = Mul(v, v)"), tmp_path / "a.onnx")
    with pytest.raises(onnxgrail.OnnxGrailError):
        onnxgrail.compress(
            tmp_path / "a.onnx", tmp_path / "b.onnx", data=data_of("copied"), target_size="50%", only_bits=True
        )
