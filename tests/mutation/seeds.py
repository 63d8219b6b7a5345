"""The good models that are broken: one per way in which a file can hold a network, all tiny."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.core import Array
from tests.tiny import ints, scalar, tiny

ROWS = 8  # samples in the data of every model


def mlp() -> onnx.ModelProto:
    """Three dense layers."""
    body = "a = Gemm <transB = 1> (x, w0, b0)\nb = Relu (a)\nm = MatMul (b, w1)\nc = Add (m, b1)\nd = Relu (c)\n"
    weights = {"w0": (8, 6), "b0": (8,), "w1": (8, 8), "b1": (8,), "w2": (8, 4)}
    return _proto(tiny("float[N,6] x => float[N,4] y", body + "y = MatMul (d, w2)", weights))


def convolutions() -> onnx.ModelProto:
    """Two convolutions, a normalisation and a head."""
    body = """a = Conv <pads = [1, 1, 1, 1]> (x, w0, b0)
    n = BatchNormalization (a, scale, shift, mean, var)
    b = Relu (n)
    c = Conv (b, w1, b1)
    d = Relu (c)
    p = GlobalAveragePool (d)
    f = Flatten (p)
    y = Gemm (f, w2, b2)"""
    weights = {"w0": (8, 3, 3, 3), "b0": (8,), "w1": (8, 8, 1, 1), "b1": (8,), "w2": (8, 4), "b2": (4,)}
    norm = {"scale": np.ones(8), "shift": np.zeros(8), "mean": np.zeros(8), "var": np.ones(8)}
    arrays = {name: array.astype(np.float32) for name, array in norm.items()}
    return _proto(tiny("float[N,3,6,6] x => float[N,4] y", body, {**weights, **arrays}))


def attention() -> onnx.ModelProto:
    """One layer with two heads."""
    lines = [
        f"{k}m = MatMul (x, w{k})\n{k}s = Reshape ({k}m, split)\n{k}t = Transpose <perm = [{perm}]> ({k}s)"
        for k, perm in (("q", "0, 2, 1, 3"), ("k", "0, 2, 3, 1"), ("v", "0, 2, 1, 3"))
    ]
    body = """s = MatMul (qt, kt)
    z = Mul (s, half)
    p = Softmax <axis = -1> (z)
    o = MatMul (p, vt)
    t = Transpose <perm = [0, 2, 1, 3]> (o)
    j = Reshape (t, join)
    y = MatMul (j, wo)"""
    weights = {"wq": (8, 8), "wk": (8, 8), "wv": (8, 8), "wo": (8, 8)}
    rest = {"split": ints(0, 0, 2, 4), "join": ints(0, 0, -1), "half": scalar(0.5)}
    return _proto(tiny("float[N,5,8] x => float[N,5,8] y", "\n".join([*lines, body]), {**weights, **rest}))


def quantised() -> onnx.ModelProto:
    """Weights as integers with scales, per channel and per tensor."""
    body = """w0 = DequantizeLinear <axis = 1> (q0, s0, z0)
    a = MatMul (x, w0)
    b = Relu (a)
    w1 = DequantizeLinear (q1, s1)
    y = MatMul (b, w1)"""
    rng = np.random.default_rng(0)
    integers = {f"q{k}": rng.integers(-100, 100, shape).astype(np.int8) for k, shape in enumerate([(6, 8), (8, 4)])}
    scales = {"s0": np.full(8, 0.01, np.float32), "s1": scalar(0.02), "z0": np.zeros(8, np.int8)}
    return _proto(tiny("float[N,6] x => float[N,4] y", body, {**integers, **scales}))


def bodies() -> onnx.ModelProto:
    """A branch and a loop that read what was computed outside."""
    body = """a = MatMul (x, w0)
    b = Relu (a)
    c = If (flag) <
        then_branch = yes () => (float[N,8] u) { u = Relu (b) },
        else_branch = no () => (float[N,8] v) { v = Mul (b, b) }>
    d = Loop (times, flag, c) <body = turn (int64 i, bool on, float[N,8] e) => (bool more, float[N,8] g)
        { more = Identity (on)
          g = Add (e, b) }>
    h = MatMul (d, w1)
    k = Relu (h)
    y = MatMul (k, w2)"""
    weights = {"w0": (6, 8), "w1": (8, 8), "w2": (8, 4), "flag": np.array(True), "times": np.array(2)}
    return _proto(tiny("float[N,6] x => float[N,4] y", body, weights))


def functions() -> onnx.ModelProto:
    """A local function between two layers."""
    body = "a = MatMul (x, w0)\nb = local.Act (a)\ny = MatMul (b, w1)"
    text = '<domain: "local", opset_import: ["" : 20]>\nAct (f) => (h) { g = Sigmoid (f)\nh = Mul (f, g) }'
    made = tiny(
        "float[N,6] x => float[N,4] y", body, {"w0": (6, 8), "w1": (8, 4)}, imports={"local": 1}, functions=text
    )
    return _proto(made)


def recurrent() -> onnx.ModelProto:
    """A gated recurrent layer."""
    body = "a, last = GRU <hidden_size = 8> (x, w0, r0, b0)\nb = Squeeze (a, axes)\ny = MatMul (b, w1)"
    weights = {"w0": (1, 24, 6), "r0": (1, 24, 8), "b0": (1, 48), "w1": (8, 4), "axes": ints(1)}
    return _proto(tiny("float[S,2,6] x => float[S,2,4] y", body, weights))


SEEDS: dict[str, Callable[[], onnx.ModelProto]] = {
    made.__name__: made for made in (mlp, convolutions, attention, quantised, bodies, functions, recurrent)
}


def data_of(model: onnx.ModelProto) -> dict[str, Array]:
    """Samples for a good model."""
    rng = np.random.default_rng(1)
    found: dict[str, Array] = {}
    for value in model.graph.input:
        sizes = [d.dim_value or ROWS for d in value.type.tensor_type.shape.dim]
        found[value.name] = rng.standard_normal(sizes).astype(np.float32)
    return found


def _proto(model: ir.Model) -> onnx.ModelProto:
    proto: onnx.ModelProto = ir.to_proto(model)
    return proto
