"""Attention whose heads must stay, in models of which other parts go."""

from __future__ import annotations

from tests.contract.attention import HEADS, SCORES, SIZE, TOKENS, WIDTH, attention
from tests.oracle import narrowed_equals_masked
from tests.tiny import feed, ints, tiny

CACHE = f"""
    kp = Concat<axis=2>(past_k, k3)
    vp = Concat<axis=2>(past_v, v3)
{SCORES.replace("k3", "kp")}"""


def test_key_value_cache_keeps_heads_and_not_the_mlp() -> None:
    past = f"float[N,{HEADS},T,{SIZE}] past_k, float[N,{HEADS},T,{SIZE}] past_v"
    model = attention(
        inputs=f"float[N,{TOKENS},{WIDTH}] x, {past}",
        outputs=", float[] kp, float[] vp",
        scores=CACHE,
        softmax="a3 = Softmax<axis=-1>(a2)\no0 = MatMul(a3, vp)",
        out="o3 = MatMul(o2, wo)\nm0 = MatMul(o3, up)\nm1 = Gelu(m0)\ny = MatMul(m1, down)",
        weights={"wo": (WIDTH, WIDTH), "up": (WIDTH, 12), "down": (12, WIDTH)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert sorted((b.kind, b.units) for b in survey.blocks) == [("mlp", 8), ("mlp", 12)]
    stuck = {r.value: r for r in survey.refusals}
    assert stuck["wk"].op == stuck["wv"].op == "Concat"
    assert "--kv-io" in stuck["wk"].reason


def test_single_head_without_a_head_axis_is_refused() -> None:
    model = tiny(
        "float[N,5,8] x => float[] y",
        "q = MatMul(x, wq)\nk = MatMul(x, wk)\nv = MatMul(x, wv)\nt = Transpose<perm=[0,2,1]>(k)\na = MatMul(q, t)\n"
        "p = Softmax(a)\no = MatMul(p, v)\ny = MatMul(o, wo)",
        {"wq": (8, 6), "wk": (8, 6), "wv": (8, 7), "wo": (7, 4)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert [b.units for b in survey.blocks] == [7]
    assert {r.value for r in survey.refusals} >= {"wq"}


def test_one_key_value_head_for_all_is_refused() -> None:
    model = attention(
        project="""q0 = MatMul(x, wq)
        q2 = Reshape(q0, into)
        q3 = Transpose<perm=[0,2,1,3]>(q2)
        k0 = MatMul(x, wk)
        k3 = Unsqueeze(k0, one)
        v0 = MatMul(x, wv)
        v3 = Unsqueeze(v0, one)
        """,
        weights={"one": ints(1)},
        projected={"wq": (WIDTH, WIDTH), "wk": (WIDTH, SIZE), "wv": (WIDTH, SIZE)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert {r.value for r in survey.refusals} >= {"wk"}
