"""Channels inside heads that keep their basis, by name."""

from __future__ import annotations

from typing import Any

import pytest

from onnxgrail.graph.ops.layers.cache import CACHE
from onnxgrail.graph.rotate.heads import complete
from onnxgrail.graph.rotate.inside import BENDS, KERNEL, OTHER, POSITIONS
from tests.contract.attention import (
    HEADS,
    SIZE,
    TOKENS,
    WIDTH,
    attention,
)
from tests.inside import found_in, turned
from tests.oracle import check_same, run
from tests.tiny import feed, ints, lines, tiny


@pytest.mark.parametrize("read", ["e = MatMul(x, wk)", "e = Identity(k3)"])
def test_a_layer_that_shares_a_weight_and_no_product_keeps_its_basis(read: str) -> None:
    model = attention(out=f"{read}\nz = ReduceMax<keepdims=0>(e)\ny0 = MatMul(o2, wo)\ny = Add(y0, z)")
    found = found_in(model)
    assert [name.rpartition("/")[2] for name in found.heads] == ["vo"]
    assert len(found.refusals) == 1


BENT = {
    "normalized": attention(
        scores=lines(
            """
            q4 = LayerNormalization(q3, table)
            k4 = Transpose<perm=[0,1,3,2]>(k3)
            a1 = MatMul(q4, k4)
            """
        ),
        weights={"table": (SIZE,)},
    ),
    "normalized values": attention(
        softmax="""
            a3 = Softmax<axis=-1>(a2)
            v4 = RMSNormalization(v3, table)
            o0 = MatMul(a3, v4)
        """,
        weights={"table": (SIZE,)},
        opset=23,
    ),
    "another product": attention(
        scores='a1 = Einsum<equation="bhqd,bhkd,b->bhqk">(q3, k3, sizes)',
        inputs=f"float[N,{TOKENS},{WIDTH}] x, float[N] sizes",
    ),
    "padded with ones": attention(
        scores="k5 = Pad(k3, more, scale)\nk4 = Transpose<perm=[0,1,3,2]>(k5)\na1 = MatMul(q3, k4)",
        softmax="a3 = Softmax<axis=-1>(a2)\nv4 = Pad(v3, more)\no0 = MatMul(a3, v4)",
        weights={"more": ints(0, 0, 1, 0, 0, 0, 1, 0)},
    ),
    "clipped values": attention(softmax="a3 = Softmax<axis=-1>(a2)\nv4 = Relu(v3)\no0 = MatMul(a3, v4)"),
    "added to values": attention(
        softmax="""
            a3 = Softmax<axis=-1>(a2)
            v4 = Add(v3, one)
            o0 = MatMul(a3, v4)
        """,
        weights={"one": (1,)},
    ),
}


@pytest.mark.parametrize(
    ("name", "left", "why"),
    [
        ("normalized", "vo", ("a1", POSITIONS)),
        ("normalized values", "qk", ("v4", BENDS)),
        ("another product", "vo", ("a1", OTHER)),
        ("padded with ones", "vo", ("k5", BENDS)),
        ("clipped values", "qk", ("v4", BENDS)),
        ("added to values", "qk", ("v4", BENDS)),
    ],
)
def test_what_depends_on_the_basis_is_refused_by_name(name: str, left: str, why: tuple[str, str]) -> None:
    model = BENT[name]
    other, _, bases = turned(model)
    assert [basis.rpartition("/")[2] for basis in bases] == [left]
    check_same(run(other, feed(model)), run(model, feed(model)))
    assert [(refusal.value, refusal.reason) for refusal in found_in(model).refusals] == [why]


def test_queries_that_a_kernel_normalizes_first_keep_their_channels() -> None:
    body = "".join(lines("$p = MatMul(x, w$p)\n", p=p) for p in "qkv")
    body += f"""
        k1 = LayerNormalization(k, table)
        o = Attention<q_num_heads={HEADS}, kv_num_heads={HEADS}>(q, k1, v)
        y = MatMul(o, wo)
    """
    weights: dict[str, Any] = {**dict.fromkeys(("wq", "wk", "wv", "wo"), (WIDTH, WIDTH)), "table": (WIDTH,)}
    model = tiny(f"float[N,{TOKENS},{WIDTH}] x => float[] y", body, weights, opset=23)
    assert [inside.kind for inside in found_in(model).heads.values()] == ["vo"]
    assert [(refusal.value, refusal.reason) for refusal in found_in(model).refusals] == [("o", POSITIONS)]
    assert not complete(list(found_in(model).heads.values()))


def test_one_bias_for_all_channels_is_refused() -> None:
    body = """
        r = Reshape(x, rows)
        v0 = Gemm(r, wv, bias)
        v1 = Reshape(v0, apart)
        v = Transpose<perm=[0,2,1,3]>(v1)
        p = Softmax<axis=-1>(scores)
        o0 = MatMul(p, v)
        o1 = Transpose<perm=[0,2,1,3]>(o0)
        o2 = Reshape(o1, back)
        y = MatMul(o2, wo)
    """
    weights = {
        "wv": (WIDTH, WIDTH),
        "wo": (WIDTH, WIDTH),
        "bias": (1,),
        "rows": ints(-1, WIDTH),
        "apart": ints(-1, TOKENS, HEADS, SIZE),
        "back": ints(-1, TOKENS, WIDTH),
    }
    inputs = f"float[N,{TOKENS},{WIDTH}] x, float[N,{HEADS},{TOKENS},{TOKENS}] scores"
    found = found_in(tiny(f"{inputs} => float[] y", body, weights))
    assert not found.heads
    assert [(refusal.op, refusal.reason) for refusal in found.refusals] == [("Gemm", BENDS)]


@pytest.mark.parametrize(
    "body",
    [
        "o, pk, pv = Attention<q_num_heads={0}, kv_num_heads={0}>(q, k, v, , ck, cv)",
        "o, pk, pv = com.microsoft.MultiHeadAttention<num_heads={0}>(q, k, v, , , , ck, cv)",
        "o = com.microsoft.Attention<num_heads={0}>(x, packed, biases)",
    ],
)
def test_kernels_with_caches_or_packed_weights_are_refused_by_name(body: str) -> None:
    text = "".join(lines("$p = MatMul(x, w$p)\n", p=p) for p in "qkv") + f"{body.format(HEADS)}\ny = MatMul(o, wo)"
    weights: dict[str, Any] = dict.fromkeys(("wq", "wk", "wv", "wo"), (WIDTH, WIDTH))
    weights |= {"packed": (WIDTH, 3 * WIDTH), "biases": (3 * WIDTH,)}
    caches = f"float[2,{HEADS},2,{SIZE}] ck, float[2,{HEADS},2,{SIZE}] cv"
    signature = f"float[2,{TOKENS},{WIDTH}] x, {caches} => float[] y"
    found = found_in(tiny(signature, text, weights, opset=23, imports={"com.microsoft": 1}))
    assert not found.heads
    assert {refusal.reason for refusal in found.refusals} == {CACHE if body.startswith("o, pk, pv = Att") else KERNEL}
