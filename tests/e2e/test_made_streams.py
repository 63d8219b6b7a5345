"""Residual streams that begin with constants, are divided by their length, or are read and written by Einsum.

Learned queries (DETR), numbers times a row each (FT-Transformer), `torch.nn.functional.normalize` as a normalization.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.core import Array
from tests.oracle import run
from tests.tiny import ints, tiny

WIDTH, LEFT, COUNT, TOKENS = 16, 6, 5, 7
BLOCK = """
    y0 = LayerNormalization(x0, g0, s0)
    h0 = MatMul(y0, up)
    r0 = Relu(h0)
    d0 = MatMul(r0, down)
    x1 = Add(x0, d0)
    y1 = LayerNormalization(x1, g1, s1)
    y = MatMul(y1, head)
"""
BEGINNINGS = {
    "numbers": "t = Unsqueeze(x, last)\nm = Mul(t, rows)\nx0 = Add(m, shifts)",
    "numbers and a token": """
        t = Unsqueeze(x, last)
        m = Mul(t, rows)
        b = Add(m, shifts)
        n = Shape<start=0, end=1>(x)
        to = Concat<axis=0>(n, one)
        c = Expand(token, to)
        x0 = Concat<axis=1>(c, b)
    """,
    "queries": """
        n = Shape<start=0, end=1>(x)
        to = Concat<axis=0>(n, many)
        q0 = Expand(queries, to)
        z0 = LayerNormalization(q0, g0, s0)
        a0 = MatMul(x, mix)
        b0 = Unsqueeze(a0, middle)
        c0 = Add(z0, b0)
        e0 = Relu(c0)
        f0 = MatMul(e0, other)
        x0 = Add(q0, f0)
    """,
}

EINSUMS = """
    x0 = MatMul(x, start)
    y0 = LayerNormalization(x0, g0, s0)
    h0 = Einsum<equation="nd,df->nf">(y0, up)
    r0 = Relu(h0)
    d0 = Einsum<equation="nf,df->nd">(r0, turned)
    x1 = Add(x0, d0)
    y1 = LayerNormalization(x1, g1, s1)
    y = MatMul(y1, head)
"""
LENGTHS = """
    x0 = MatMul(x, start)
    l0 = ReduceL2(x0, last)
    c0 = Clip(l0, least)
    size = Shape(x0)
    e0 = Expand(c0, size)
    n0 = Div(x0, e0)
    m0 = Mul(n0, root)
    y0 = Mul(m0, g0)
    h0 = MatMul(y0, up)
    r0 = Relu(h0)
    d0 = MatMul(r0, down)
    x1 = Add(x0, d0)
    l1 = ReduceL2(x1, last)
    k1 = Mul(l1, share)
    a1 = Add(k1, least)
    n1 = Div(x1, a1)
    y1 = Mul(n1, g1)
    y = MatMul(y1, head)
"""


def planted(beginning: str) -> ir.Model:
    """A network whose stream has few directions, none of them with a mean."""
    rng = np.random.default_rng(0)
    columns = np.linalg.qr(np.concatenate([np.ones((WIDTH, 1)), rng.normal(size=(WIDTH, LEFT))], axis=1))[0]

    def inside(*shape: int) -> Array:
        return (rng.normal(size=(*shape, LEFT)) @ columns[:, 1:].T).astype(np.float32)

    weights = {
        "rows": inside(COUNT),
        "shifts": inside(COUNT),
        "token": inside(1, 1),
        "queries": inside(1, TOKENS),
        "down": inside(48),
        "other": inside(WIDTH),
        "start": inside(COUNT),
        "turned": np.ascontiguousarray(inside(48).T),
        "least": np.float32(1e-8),
        "root": np.float32(WIDTH**0.5),
        "share": np.float32(WIDTH**-0.5),
        "mix": (COUNT, WIDTH),
        "up": (WIDTH, 48),
        "head": (WIDTH, 3),
        **dict.fromkeys(("g0", "s0", "g1", "s1"), (WIDTH,)),
        "last": ints(-1),
        "middle": ints(1),
        "one": ints(1, WIDTH),
        "many": ints(TOKENS, WIDTH),
    }
    whole = {"lengths": LENGTHS, "einsums": EINSUMS}
    body = whole[beginning] if beginning in whole else BEGINNINGS[beginning] + BLOCK
    used = {name: value for name, value in weights.items() if f"{name})" in body or f"{name}," in body}
    outputs = "N,3" if beginning in whole else "N,S,3"
    return tiny(f"float[N,{COUNT}] x => float[{outputs}] y", body, used)


@pytest.mark.parametrize("beginning", [*BEGINNINGS, "lengths", "einsums"])
def test_such_a_stream_is_narrowed_exactly(beginning: str) -> None:
    model = planted(beginning)
    x = {"x": np.random.default_rng(1).normal(size=(64, COUNT)).astype(np.float32)}
    (name,) = [block["name"] for block in onnxgrail.inspect(model).blocks if block["kind"] == "stream"]
    result = onnxgrail.compress(model, data=x, blocks=("stream",), unit_ratio=1 - LEFT / WIDTH, round_to=1)
    (block,) = [block for block in result.report.data["blocks"] if block["kind"] == "stream"]
    assert (block["name"], block["kept"]) == (name, LEFT)
    assert result.report.data["model"]["params_after"] < result.report.data["model"]["params_before"]
    np.testing.assert_allclose(run(result.model, x)["y"], run(model, x)["y"], rtol=1e-3, atol=1e-3)
