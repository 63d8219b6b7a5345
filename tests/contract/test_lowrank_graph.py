"""Matrices that pairs can replace, the rewrite, and where residual layers begin and end."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.core import Array
from onnxgrail.graph.cuts.residual import Layer, layers
from onnxgrail.graph.fittable.matrices import array_of, factor, matrices, refusal
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.trace.facts import constants
from tests.tiny import feed, mlp, tiny

PLAIN = {"w": (5, 6), "c": (6,)}
TURNED = {"w": (6, 5), "c": (6,)}


def outputs(model: ir.Model, fed: dict[str, Array]) -> Array:
    with open_session(to_bytes(model)) as session:
        return session.run(fed)["y"]


def rewritten(model: ir.Model, rank: int | None = None) -> ir.Model:
    """Every matrix replaced by a pair from its own singular value decomposition."""
    clone = model.clone()
    for matrix in dict.fromkeys(matrices(clone).values()):
        left, values, right = np.linalg.svd(array_of(matrix, clone.graph).astype(np.float64), full_matrices=False)
        factor(clone.graph, matrix, (left * values)[:, :rank], right[:rank])
    return clone


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("y = MatMul(x, w)", PLAIN),
        ("y = Gemm(x, w, c)", PLAIN),
        ("y = Gemm<transB=1, alpha=0.5, beta=2.0>(x, w, c)", TURNED),
        ("v = Transpose<perm=[1,0]>(w)\ny = MatMul(x, v)", TURNED),
        ("v = Transpose<perm=[1,0]>(w)\nm = MatMul(x, v)\ny = Add(m, c)", TURNED),
        ("v = Transpose<perm=[1,0]>(w)\ny = Gemm<transB=1>(x, v)", PLAIN),
        ("a = MatMul(x, w)\nb = Tanh(x)\nd = Gemm(b, w, c)\ny = Sub(a, d)", PLAIN),
        ("v = Transpose<perm=[1,0]>(w)\na = Gemm<transB=1>(x, w)\nb = MatMul(x, v)\ny = Mul(a, b)", TURNED),
        ("y = com.microsoft.FusedMatMul<alpha=0.5, transB=1>(x, w)", TURNED),
    ],
)
def test_a_full_pair_computes_the_same_and_a_narrow_one_is_the_product(text: str, weights: dict) -> None:
    model = tiny("float[N,5] x => float[N,6] y", text, weights, imports={"com.microsoft": 1})
    fed = feed(model)
    full = rewritten(model)
    np.testing.assert_allclose(outputs(full, fed), outputs(model, fed), rtol=1e-4, atol=1e-5)
    assert "w" not in full.graph.initializers
    assert not any(node.op_type == "Transpose" for node in full.graph)
    slim = rewritten(model, rank=2)
    masked = model.clone()
    stored = masked.graph.initializers["w"].const_value.numpy()
    left, values, right = np.linalg.svd(stored, full_matrices=False)
    masked.graph.initializers["w"].const_value = ir.tensor(((left * values)[:, :2] @ right[:2]).astype(np.float32))
    np.testing.assert_allclose(outputs(slim, fed), outputs(masked, fed), rtol=1e-4, atol=1e-5)
    assert sum(v.const_value.size for n, v in slim.graph.initializers.items() if n != "c") <= 2 * (5 + 6) * 2


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_written_back(dtype: type) -> None:
    kind = {"float16": "float16", "bfloat16": "bfloat16"}[np.dtype(dtype).name]
    weight = np.random.default_rng(0).normal(size=(5, 6)).astype(dtype)
    model = tiny(f"{kind}[N,5] x => {kind}[N,6] y", "y = MatMul(x, w)", {"w": weight})
    full = rewritten(model)
    assert {v.const_value.numpy().dtype for v in full.graph.initializers.values()} == {np.dtype(dtype)}
    fed = {"x": np.random.default_rng(1).normal(size=(3, 5)).astype(dtype)}
    got, wanted = (outputs(m, fed).astype(np.float32) for m in (full, model))
    np.testing.assert_allclose(got, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("text", "weights", "reason"),
    [
        ("t = Transpose(x)\ny = MatMul(w, t)", {"w": (6, 5)}, "its weight is the left operand"),
        ("y = Gemm<transA=1>(x, w)", {"w": (5, 6)}, "its operands are turned"),
        ("a = MatMul(x, w)\nb = Transpose<perm=[1,0]>(w)\ny = MatMul(a, b)", {"w": (5, 6)}, "plain and transposed"),
        ("a = MatMul(x, w)\ni = ReduceSum(w)\ny = Add(a, i)", {"w": (5, 6)}, "its weight is also read by ReduceSum"),
        ("i = Cast<to=1>(w)\ny = MatMul(x, i)", {"w": np.ones((5, 6), np.float16)}, "stored in another type"),
        ("u = Exp(w)\ny = MatMul(x, u)", {"w": (5, 6)}, "its weight is made by Exp"),
        ("y = MatMul(x, w)", {"w": (2, 5, 6)}, "no plain matrix"),
        ("u = Unsqueeze(x, n)\nv = Unsqueeze(u, n)\ny = Conv(v, w)", {"w": (5, 1, 1, 5), "n": np.array([1])}, "Conv"),
    ],
)
def test_what_stays_has_a_reason(text: str, weights: dict, reason: str) -> None:
    model = tiny("float[N,5] x => float[] y", text, weights)
    known, fixed = matrices(model), constants(model)
    assert not known
    reasons = [r.reason for node in model.graph if (r := refusal(node, known, fixed)) is not None]
    assert reasons
    assert all(reason in r for r in reasons)


def test_products_of_two_activations_are_no_refusal() -> None:
    model = tiny("float[N,5,5] x => float[N,5,5] y", "y = MatMul(x, x)", {})
    assert [refusal(node, {}, constants(model)) for node in model.graph] == [None]


def found_layers(model: ir.Model) -> tuple[Layer, ...]:
    facts = observe(model, feed(model), providers=("CPUExecutionProvider",))
    return layers(model, facts.shapes, constants(model))


def test_every_skip_connection_of_an_mlp_is_a_layer() -> None:
    found = found_layers(mlp(3, 8))
    assert [(layer.begin, layer.end) for layer in found] == [("x0", "x1"), ("x1", "x2"), ("x2", "x3")]
    assert [sum(n.op_type == "MatMul" for n in layer.nodes) for layer in found] == [2, 2, 2]


ATTENTION = """
    n$i = LayerNormalization(x$i, g)
    q$i = MatMul(n$i, w)
    k$i = MatMul(n$i, w)
    t$i = Transpose<perm=[0,2,1]>(k$i)
    s$i = MatMul(q$i, t$i)
    m$i = Add(s$i, mask)
    p$i = Softmax(m$i)
    o$i = MatMul(p$i, q$i)
"""


def transformer(rest: str) -> ir.Model:
    text = "x0 = MatMul(x, v)\nmask = Gelu(z)\n"
    for i in range(2):
        text += (ATTENTION + rest).replace("$i", str(i)).replace("$j", str(i + 1))
    weights = {"w": (6, 6), "v": (6, 6), "g": (6,)}
    return tiny("float[N,6,6] x, float[N,6,6] z => float[N,6,6] y", f"{text}\ny = Tanh(x2)", weights)


def test_attention_and_the_net_behind_it_are_one_layer() -> None:
    """Masks of the same shape as the scores are no skip connections."""
    found = found_layers(transformer("h$i = Add(x$i, o$i)\nf$i = MatMul(h$i, v)\na$i = Tanh(f$i)\nx$j = Add(h$i, a$i)"))
    assert [(layer.begin, layer.end) for layer in found] == [("x0", "x1"), ("x1", "x2")]


def test_attention_beside_the_net_is_one_layer() -> None:
    found = found_layers(transformer("f$i = MatMul(n$i, v)\nh$i = Add(x$i, o$i)\nx$j = Add(h$i, f$i)"))
    assert [(layer.begin, layer.end) for layer in found] == [("x0", "x1"), ("x1", "x2")]


def test_normalised_sums_end_a_layer_where_the_next_begins() -> None:
    rest = "h$i = Add(x$i, o$i)\nl$i = LayerNormalization(h$i, g)\nf$i = MatMul(l$i, v)\ns$i_ = Add(l$i, f$i)\n"
    found = found_layers(transformer(f"{rest}x$j = LayerNormalization(s$i_, g)"))
    assert [(layer.begin, layer.end) for layer in found] == [("x0", "x1"), ("x1", "s1_")]
