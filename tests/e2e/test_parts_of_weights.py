"""Parts of weights with bounds that are computed from sizes: keys and values of nn.MultiheadAttention, if traced."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.core import Array
from tests.oracle import run
from tests.tiny import ints, tiny

WIDTH, KEPT = 8, 3
BODY = """
    s = Shape(x)
    e = Gather(s, last)
    u = Unsqueeze(e, zero)
    twice = Mul(u, two)
    a = Slice(w, zero, u, zero)
    b = Slice(w, u, twice, zero)
    ta = Transpose(a)
    tb = Transpose(b)
    h = MatMul(x, ta)
    g = MatMul(x, tb)
    r = Sigmoid(h)
    z = Mul(r, g)
    y = MatMul(z, v)
"""


def model_of(sizes: str) -> ir.Model:
    """A gate: rows of one weight make both factors."""
    v = np.random.default_rng(0).normal(size=(WIDTH, 5)).astype(np.float32)
    v[KEPT:] = 0
    weights = {"w": (24, WIDTH), "v": v, "zero": ints(0), "two": ints(2), "last": np.array(2)}
    return tiny(f"float[{sizes},{WIDTH}] x => float[{sizes},5] y", BODY, weights)


def feeds(*shape: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(1).normal(size=(*shape, WIDTH)).astype(np.float32)}


@pytest.mark.parametrize("sizes", ["N,6", "N,S", "2,6"])
def test_they_are_stored_if_no_input_changes_the_sizes(sizes: str) -> None:
    model, data = model_of(sizes), feeds(2 if sizes[0] == "2" else 32, 6)
    result = onnxgrail.compress(model, data=data, unit_ratio=1 - KEPT / WIDTH, round_to=1, blocks=("mlp",))
    (block,) = result.report.data["blocks"]
    assert (block["units"], block["kept"]) == (WIDTH, KEPT)
    np.testing.assert_allclose(run(result.model, data)["y"], run(model, data)["y"], rtol=1e-3, atol=1e-4)
    assert "w" not in result.model.graph.initializers


def test_a_table_is_not_cut_to_the_length_of_the_samples() -> None:
    """If the model takes no other length of these samples, nothing tells that other samples are longer."""
    body = """
        s = Shape(x)
        e = Gather(s, one)
        u = Unsqueeze(e, zero)
        p = Slice(table, zero, u, zero)
        a = Add(x, p)
        f = Reshape(a, flat)
        h = MatMul(f, w)
        r = Relu(h)
        y = MatMul(r, v)
    """
    weights = {"table": (9, WIDTH), "w": (2 * WIDTH, 12), "v": (12, 3), "zero": ints(0), "one": np.array(1)}
    model = tiny(f"float[N,S,{WIDTH}] x => float[N,M,3] y", body, {**weights, "flat": ints(0, -1, 2 * WIDTH)})
    slim = onnxgrail.compress(model, data=feeds(32, 2), unit_ratio=0.5).model
    for length in (2, 4, 8):
        assert run(slim, feeds(3, length))["y"].shape == (3, length // 2, 3)
