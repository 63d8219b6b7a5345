"""Attention in the spellings of real exports: heads go whole."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.core import Block
from onnxgrail.graph.trace.survey import Survey
from tests.contract.attention import HEADS, PROJECTIONS, SCORES, SHAPES, SIZE, SPLIT, TOKENS, WIDTH, attention
from tests.oracle import narrowed_equals_masked
from tests.tiny import feed, ints, lines, scalar


def heads(survey: Survey, units: int = HEADS, size: int = SIZE) -> Block:
    """The one block of heads, with as many units as expected."""
    (block,) = survey.blocks
    assert (block.kind, block.units, block.unit_size) == ("heads", units, size)
    return block


def names(block: Block, role: str) -> set[str]:
    return {s.initializer for s in block.slots if s.role == role}


@pytest.mark.parametrize("ratio", [0.25, 0.75])
@pytest.mark.parametrize("shapes", SHAPES)
def test_separate_projections(shapes: str, ratio: float) -> None:
    model = attention(shapes=shapes)
    block = heads(narrowed_equals_masked(model, feed(model), ratio))
    assert names(block, "producer") == {"wq", "wk", "wv"}
    assert names(block, "passenger") == {"bq", "bk", "bv"}
    assert names(block, "consumer") == {"wo"}
    assert block.consumers[0].index.tolist() == [[SIZE * h, SIZE * h + 1] for h in range(HEADS)]
    assert not block.probes[0].pooled


def test_static_with_heads_merged_into_the_batch() -> None:
    """Dynamo without dynamic axes: keys pass through a shape in which batch and heads are one constant."""
    model = attention(
        inputs=f"float[2,{TOKENS},{WIDTH}] x",
        shapes="copied",
        scores="""
        k4 = Reshape(k3, merged)
        k5 = Transpose<perm=[0,2,1]>(k4)
        k6 = Reshape(k5, apart)
        a0 = MatMul(q3, k6)
        a1 = Mul(a0, scale)""",
        weights={"merged": ints(2 * HEADS, TOKENS, SIZE), "apart": ints(2, HEADS, SIZE, TOKENS)},
    )
    heads(narrowed_equals_masked(model, feed(model)))


def test_dynamic_keys_through_a_merged_axis() -> None:
    """Dynamo's decomposed attention: sizes of the merged axes come from the keys themselves, or are free."""
    model = attention(
        shapes="dynamic",
        scores="""
        ks = Shape<start=2, end=3>(k3)
        ke = Shape<start=3, end=4>(k3)
        merged = Concat<axis=0>(minus, ks, ke)
        k4 = Reshape<allowzero=1>(k3, merged)
        k5 = Transpose<perm=[0,2,1]>(k4)
        kb = Shape<start=0, end=2>(k3)
        apart = Concat<axis=0>(kb, ke, ks)
        k6 = Reshape<allowzero=1>(k5, apart)
        root = Sqrt(scale)
        q5 = Mul(q3, root)
        k7 = Mul(k6, root)
        a1 = MatMul(q5, k7)""",
    )
    heads(narrowed_equals_masked(model, feed(model)))


def test_heads_merged_into_a_computed_batch() -> None:
    """Bloom and DeBERTa: the size of the merged axis is the batch times a head count that is a constant."""
    model = attention(
        shapes="baked",
        scores="""
        bh = Mul(b, heads)
        merged = Concat<axis=0>(bh, s, size)
        k4 = Reshape(k3, merged)
        k5 = Transpose<perm=[0,2,1]>(k4)
        apart = Concat<axis=0>(b, heads, size, s)
        k6 = Reshape(k5, apart)
        a0 = MatMul(q3, k6)
        a1 = Mul(a0, scale)""",
    )
    heads(narrowed_equals_masked(model, feed(model)))


def test_guard_against_rows_without_keys() -> None:
    softmax = """
        a3 = Softmax<axis=-1>(a2)
        nan = IsNaN(a3)
        a4 = Where(nan, zero, a3)
        o0 = MatMul(a4, v3)"""
    model = attention(softmax=softmax, weights={"zero": scalar(0)})
    heads(narrowed_equals_masked(model, feed(model)))


@pytest.mark.parametrize("split", ["Split<axis=2, num_outputs=3>(x1)", "Split<axis=2>(x1, thirds)"])
def test_packed_in_thirds(split: str) -> None:
    model = attention(
        project=f"x0 = MatMul(x, w)\nx1 = Add(x0, b)\nq1, k1, v1 = {split}\n{SPLIT}",
        weights={"thirds": ints(WIDTH, WIDTH, WIDTH)},
        projected={"w": (WIDTH, 3 * WIDTH), "b": (3 * WIDTH,)},
    )
    block = heads(narrowed_equals_masked(model, feed(model)))
    assert block.producers[0].index[1].tolist() == [2, 3, 10, 11, 18, 19]


@pytest.mark.parametrize(
    "take",
    [
        "".join(lines("$p3 = Gather<axis=0>(t, i$i)\n", p=p, i=i) for i, p in enumerate("qkv")),
        "a, b, c = Split<axis=0, num_outputs=3>(t)\nq3 = Squeeze(a, i0s)\nk3 = Squeeze(b, i0s)\nv3 = Squeeze(c, i0s)\n",
    ],
)
def test_packed_with_the_three_as_an_axis(take: str) -> None:
    """Swin and timm."""
    model = attention(
        project=f"x1 = MatMul(x, w)\nr = Reshape(x1, five)\nt = Transpose<perm=[2,0,3,1,4]>(r)\n{take}",
        weights={"five": ints(-1, TOKENS, 3, HEADS, SIZE), "i0s": ints(0), **{f"i{i}": np.array(i) for i in range(3)}},
        projected={"w": (WIDTH, 3 * WIDTH)},
    )
    assert heads(narrowed_equals_masked(model, feed(model))).producers[0].index.shape == (HEADS, 3 * SIZE)


def test_packed_head_by_head() -> None:
    """NeoX and Bloom: a head's q, k and v lie side by side."""
    model = attention(
        project="""x1 = MatMul(x, w)
        r = Reshape(x1, into3)
        t = Transpose<perm=[0,2,1,3]>(r)
        q3, k3, v3 = Split<axis=3, num_outputs=3>(t)
        """,
        weights={"into3": ints(0, 0, HEADS, 3 * SIZE)},
        projected={"w": (WIDTH, 3 * WIDTH)},
    )
    block = heads(narrowed_equals_masked(model, feed(model)))
    assert block.producers[0].index[1].tolist() == list(range(6, 12))


def test_multihead_attention_module() -> None:
    """torch.nn.MultiheadAttention: packed, tokens first, heads merged into the batch."""
    take = "".join(
        lines(
            "$p = Gather<axis=0>(sq, i$i)\n$pm = Reshape($p, merged)\n$pt = Transpose<perm=[1,0,2]>($pm)\n"
            "$p3 = Reshape($pt, apart)\n",
            p=p,
            i=i,
        )
        for i, p in enumerate("qkv")
    )
    model = attention(
        inputs=f"float[{TOKENS},N,{WIDTH}] x",
        project=f"""x0 = MatMul(x, w)
        x1 = Add(x0, b)
        r = Reshape(x1, three)
        un = Unsqueeze(r, zero)
        tr = Transpose<perm=[3,1,2,0,4]>(un)
        sq = Squeeze(tr, last)
        {take}""",
        merge="o1 = Transpose<perm=[2,0,1,3]>(o0)\no2 = Reshape(o1, rows)",
        out="g = Gemm<transB=1>(o2, wo, bo)\ny = Reshape(g, back5)",
        weights={
            "three": ints(TOKENS, -1, 3, WIDTH),
            "zero": ints(0),
            "last": ints(3),
            "merged": ints(TOKENS, -1, SIZE),
            "apart": ints(-1, HEADS, TOKENS, SIZE),
            "rows": ints(-1, WIDTH),
            "back5": ints(TOKENS, -1, 5),
            "wo": (5, WIDTH),
            "bo": (5,),
            **{f"i{i}": np.array(i) for i in range(3)},
        },
        projected={"w": (WIDTH, 3 * WIDTH), "b": (3 * WIDTH,)},
    )
    heads(narrowed_equals_masked(model, feed(model)))


@pytest.mark.parametrize("shapes", ["vision", "dynamic"])
def test_groups_of_query_heads(shapes: str) -> None:
    """GQA: a unit is a key-value head with all query heads that read it."""
    repeat = "".join(
        lines(
            "$p6 = Unsqueeze($p5, two)\n$p7 = Expand($p6, grown)\n$p3 = Reshape($p7, all)\n",
            p=p,
        )
        for p in "kv"
    )
    split = "".join(lines("$p2 = Reshape($p1, into$p)\n$p5 = Transpose<perm=[0,2,1,3]>($p2)\n", p=p) for p in "qkv")
    model = attention(
        shapes=shapes,
        project=f"{PROJECTIONS}{split}q3 = Identity(q5)\n{repeat}",
        weights={
            "intoq": ints(0, 0, HEADS, SIZE),
            "intok": ints(0, 0, 2, SIZE),
            "intov": ints(0, 0, 2, SIZE),
            "two": ints(2),
            "grown": ints(1, 2, 2, TOKENS, SIZE),
            "all": ints(-1, HEADS, TOKENS, SIZE),
        },
        projected={
            **{f"w{p}": (WIDTH, n * SIZE) for p, n in (("q", HEADS), ("k", 2), ("v", 2))},
            **{f"b{p}": (n * SIZE,) for p, n in (("q", HEADS), ("k", 2), ("v", 2))},
        },
    )
    block = heads(narrowed_equals_masked(model, feed(model)), units=2, size=2 * SIZE)
    indices = {s.initializer: s.index.tolist() for s in block.slots}
    assert indices["wq"] == indices["wo"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert indices["wk"] == indices["wv"] == [[0, 1], [2, 3]]


ROTATE = """
    $p5 = Slice($p3, zero, half, last)
    $p6 = Slice($p3, half, end, last)
    $p7 = Neg($p6)
    $p8 = Concat<axis=-1>($p7, $p5)
    $p9 = Mul($p3, cos)
    $pa = Mul($p8, sin)
    $pr = Add($p9, $pa)
"""


@pytest.mark.parametrize("table", ["constant", "looked-up"])
def test_rotary_embedding(table: str) -> None:
    rotate = "".join(lines(ROTATE, p=p) for p in "qk")
    angles = ""
    if table == "looked-up":
        angles = "".join(f"{t}0 = Gather({t}_table, ids)\n{t} = Unsqueeze({t}0, one)\n" for t in ("cos", "sin"))
    rng = np.random.default_rng(5)
    constants = {t: rng.normal(size=(1, 1, TOKENS, SIZE)).astype(np.float32) for t in ("cos", "sin")}
    if table == "looked-up":
        constants = {f"{t}_table": rng.normal(size=(9, SIZE)).astype(np.float32) for t in ("cos", "sin")}
    model = attention(
        inputs=f"float[N,{TOKENS},{WIDTH}] x, int64[N,{TOKENS}] ids" if angles else f"float[N,{TOKENS},{WIDTH}] x",
        scores=f"{angles}{rotate}k4 = Transpose<perm=[0,1,3,2]>(kr)\na0 = MatMul(qr, k4)\na1 = Mul(a0, scale)",
        weights={
            "zero": ints(0),
            "half": ints(SIZE // 2),
            "end": ints(2**63 - 1),
            "last": ints(3),
            "one": ints(1),
            **constants,
        },
    )
    heads(narrowed_equals_masked(model, feed(model)))


MASKS = {
    "additive-input": (f", float[N,1,{TOKENS},{TOKENS}] m", "a2 = Add(a1, m)"),
    "boolean-input": (f", bool[N,{TOKENS}] m", "m1 = Unsqueeze(m, axes)\nm2 = Where(m1, none, low)\na2 = Add(a1, m2)"),
    "expanded": (
        f", bool[N,1,{TOKENS},{TOKENS}] m",
        "m0 = Shape(a1)\nm1 = Expand(m, m0)\nm2 = Where(m1, a1, low)\na2 = Identity(m2)",
    ),
    "relative-bias": ("", "a2 = Add(a1, bias)"),
    "slopes": ("", "a2 = Add(a1, alibi)"),
    "table-by-bucket": (
        "",
        "t0 = Gather(table, buckets)\nt1 = Transpose<perm=[2,0,1]>(t0)\nt2 = Unsqueeze(t1, front)\na2 = Add(a1, t2)",
    ),
    "one-constant": ("", "a2 = Add(a1, causal)"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_and_biases(name: str) -> None:
    rng = np.random.default_rng(0)
    inputs, mask = MASKS[name]
    model = attention(
        inputs=f"float[N,{TOKENS},{WIDTH}] x{inputs}",
        mask=mask,
        weights={
            "axes": ints(1, 2),
            "none": scalar(0),
            "low": scalar(-3e4),
            "bias": (1, HEADS, TOKENS, TOKENS),
            "alibi": rng.normal(size=(HEADS, 1, TOKENS)).astype(np.float32),
            "table": rng.normal(size=(7, HEADS)).astype(np.float32),
            "buckets": rng.integers(0, 7, (TOKENS, TOKENS)),
            "front": ints(0),
            "causal": np.triu(np.full((TOKENS, TOKENS), -3e4, np.float32), 1),
        },
    )
    block = heads(narrowed_equals_masked(model, feed(model)))
    carried = {"relative-bias": {"bias"}, "slopes": {"alibi"}}.get(name, set())
    assert carried <= names(block, "passenger") | names(block, "producer")


def test_norms_over_a_head_stay() -> None:
    """Qwen3: the scale of a query norm belongs to all heads."""
    model = attention(
        scores=f"q9 = LayerNormalization(q3, gamma)\n{SCORES.replace('q3', 'q9')}", weights={"gamma": (SIZE,)}
    )
    block = heads(narrowed_equals_masked(model, feed(model)))
    assert "gamma" not in {s.initializer for s in block.slots}


def test_keys_and_values_from_another_input() -> None:
    project = PROJECTIONS.replace("MatMul(x, wk)", "MatMul(m, wk)").replace("MatMul(x, wv)", "MatMul(m, wv)")
    model = attention(
        inputs=f"float[N,{TOKENS},{WIDTH}] x, float[N,S,{WIDTH}] m",
        shapes="tokens-free",
        project=project + SPLIT,
    )
    heads(narrowed_equals_masked(model, feed(model, S=3)))
