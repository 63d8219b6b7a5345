"""One key-value head for all query heads, and caches on the interface, in the spellings of real exports."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.core import Block
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.survey import Survey
from onnxgrail.graph.trace.tracer import trace
from tests.contract.attention import HEADS, SCORES, SIZE, TOKENS, WIDTH, attention
from tests.oracle import narrowed, narrowed_equals_masked
from tests.tiny import feed, ints, lines, tiny

QUERY = "q0 = MatMul(x, wq)\nq2 = Reshape(q0, into)\nq3 = Transpose<perm=[0,2,1,3]>(q2)\n"
SINGLE = {"wq": (WIDTH, WIDTH), "wk": (WIDTH, SIZE), "wv": (WIDTH, SIZE)}
SIZES = "gb = Shape<start=0, end=1>(x)\ngs = Shape<start=1, end=2>(x)\n"
GROWN = {
    "constant": ("", {"grown": ints(1, 1, HEADS, TOKENS, SIZE), "all": ints(-1, HEADS, TOKENS, SIZE)}),
    # dynamo: sizes from Shape, the number of copies a constant in the middle
    "dynamo": (
        f"{SIZES}grown = Concat<axis=0>(gb, ones, copies, gs, size)\nall = Concat<axis=0>(gb, copies, gs, size)\n",
        {"ones": ints(1), "copies": ints(HEADS), "size": ints(SIZE)},
    ),
    # TorchScript: the target of Expand passes through Equal and Where, the merged size is a product
    "legacy": (
        (
            f"{SIZES}asked = Concat<axis=0>(gb, ones, copies, gs, size)\nfree = Equal(asked, minus)\n"
            "grown = Where(free, five, asked)\ntimes = Mul(ones, copies)\nall = Concat<axis=0>(gb, times, gs, size)\n"
        ),
        {"ones": ints(1), "copies": ints(HEADS), "size": ints(SIZE), "minus": ints(-1), "five": ints(1, 1, 1, 1, 1)},
    ),
}


def queries(survey: Survey, size: int = SIZE) -> Block:
    """The block of query heads, with its key and value left alone."""
    (block,) = [b for b in survey.blocks if b.kind == "heads"]
    assert (block.units, block.unit_size) == (HEADS, size)
    touched = {s.initializer for s in block.slots}
    assert "wq" in touched
    assert not touched & {"wk", "wv"}
    assert {r.value for r in survey.refusals} >= {"wk", "wv"}
    return block


@pytest.mark.parametrize("ratio", [0.25, 0.75])
def test_one_key_value_head_broadcast(ratio: float) -> None:
    model = attention(
        project=QUERY + "".join(lines("$p0 = MatMul(x, w$p)\n$p3 = Unsqueeze($p0, one)\n", p=p) for p in "kv"),
        weights={"one": ints(1)},
        projected=SINGLE,
    )
    survey = narrowed_equals_masked(model, feed(model), ratio)
    queries(survey)
    assert any("one value head" in r.reason for r in survey.refusals if r.value == "wv")


@pytest.mark.parametrize("spelling", GROWN)
def test_one_key_value_head_repeated(spelling: str) -> None:
    text, constants = GROWN[spelling]
    repeat = "$p0 = MatMul(x, w$p)\n$p5 = Unsqueeze($p0, both)\n$p6 = Expand($p5, grown)\n$p3 = Reshape($p6, all)\n"
    model = attention(
        project=QUERY + text + "".join(lines(repeat, p=p) for p in "kv"),
        weights={"both": ints(1, 2), **constants},
        projected=SINGLE,
    )
    queries(narrowed_equals_masked(model, feed(model)))


@pytest.mark.parametrize("size", [2, 8])
def test_one_key_value_head_packed_with_the_queries(size: int) -> None:
    """Falcon: [query heads, key, value] in one axis; heads may be narrower or wider than there are many."""
    model = tiny(
        f"float[N,{TOKENS},{WIDTH}] x => float[] y",
        """p = MatMul(x, w)
        r = Reshape(p, into)
        q2 = Slice(r, i0, i4, i2)
        k2 = Slice(r, i4, i5, i2)
        v2 = Slice(r, i5, i6, i2)
        q3 = Transpose<perm=[0,2,1,3]>(q2)
        k3 = Transpose<perm=[0,2,1,3]>(k2)
        v3 = Transpose<perm=[0,2,1,3]>(v2)
        k4 = Transpose<perm=[0,1,3,2]>(k3)
        a = MatMul(q3, k4)
        s = Softmax<axis=-1>(a)
        o = MatMul(s, v3)
        t = Transpose<perm=[0,2,1,3]>(o)
        j = Reshape(t, back)
        y = MatMul(j, wo)""",
        {
            "w": (WIDTH, (HEADS + 2) * size),
            "wo": (HEADS * size, 3),
            "into": ints(0, 0, HEADS + 2, size),
            "back": ints(0, 0, HEADS * size),
            **{f"i{i}": ints(i) for i in (0, 2, 4, 5, 6)},
        },
    )
    survey = narrowed_equals_masked(model, feed(model))
    (block,) = survey.blocks
    assert (block.kind, block.units, block.unit_size) == ("heads", HEADS, size)
    assert block.producers[0].index.max() < HEADS * size


CACHED = """
    kp = Concat<axis=2>($past_k, k3)
    vp = Concat<axis=2>($past_v, v3)
"""


def cached(text: str = lines(CACHED, past_k="past_k", past_v="past_v"), shape: str = f"N,{HEADS},T,{SIZE}") -> ir.Model:
    """A layer whose keys and values are appended to those of earlier tokens."""
    return attention(
        inputs=f"float[N,{TOKENS},{WIDTH}] x, float[{shape}] past_k, float[{shape}] past_v",
        outputs=", float[] kp, float[] vp",
        scores=f"{text}{SCORES.replace('k3', 'kp')}",
        softmax="a3 = Softmax<axis=-1>(a2)\no0 = MatMul(a3, vp)",
        weights={"wo": (WIDTH, 5)},
    )


TURNED = f"""
    tk = Transpose<perm=[0,2,1,3]>(past_k)
    tv = Transpose<perm=[0,2,1,3]>(past_v)
{lines(CACHED, past_k="tk", past_v="tv")}"""
APPENDED = f"""
    tk = Concat<axis=2>(past_k)
    tv = Identity(past_v)
{lines(CACHED, past_k="tk", past_v="tv")}"""


@pytest.mark.parametrize("text", [None, TURNED, APPENDED])
def test_cache_narrows_with_the_interface(text: str | None) -> None:
    shape = f"N,T,{HEADS},{SIZE}" if text is TURNED else f"N,{HEADS},T,{SIZE}"
    model = cached(shape=shape) if text is None else cached(text, shape)
    survey = narrowed_equals_masked(model, feed(model), interface=True)
    (block,) = survey.blocks
    assert (block.kind, block.units) == ("heads", HEADS)
    axis = 2 if text is TURNED else 1
    assert {n: survey.marks[n][0].axes for n in ("past_k", "past_v", "kp", "vp")} == {
        "past_k": (axis,),
        "past_v": (axis,),
        "kp": (1,),
        "vp": (1,),
    }
    slim = narrowed(model, survey, np.isin(np.arange(survey.ids), block.ids[:1]))
    sizes = {v.name: v.shape[axis if v.name.startswith("past") else 1] for v in slim.graph.inputs[1:]}
    assert sizes == {"past_k": HEADS - 1, "past_v": HEADS - 1}


def test_cache_stays_without_leave() -> None:
    model = cached()
    survey = narrowed_equals_masked(model, feed(model))
    assert not survey.blocks
    reasons = {r.value: r.reason for r in survey.refusals}
    assert "--kv-io" in reasons["wk"]
    assert "--kv-io" in reasons["wv"]


def test_cache_that_is_read_before_its_heads_are_known_stays() -> None:
    model = cached(f"early = ReduceMax<keepdims=0>(past_k)\n{lines(CACHED, past_k='past_k', past_v='past_v')}")
    survey = narrowed_equals_masked(model, feed(model), interface=True)
    assert any("also read by ReduceMax" in r.reason for r in survey.refusals)


def test_keys_without_a_past_leave_only_with_leave() -> None:
    """A model for the first tokens: caches are outputs only."""
    model = attention(outputs=", float[] k3, float[] v3")
    assert not narrowed_equals_masked(model, feed(model)).blocks
    (block,) = narrowed_equals_masked(model, feed(model), interface=True).blocks
    assert block.units == HEADS


def test_attention_to_a_cached_encoder() -> None:
    """Keys and values come from the first token's run, and no projection makes them here."""
    shape = f"float[N,{HEADS},T,{SIZE}]"
    model = attention(
        inputs=f"float[N,{TOKENS},{WIDTH}] x, {shape} k3, {shape} v3", project=QUERY, projected={"wq": (WIDTH, WIDTH)}
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert not survey.blocks
    assert any("--kv-io" in r.reason for r in survey.refusals if r.value == "wq")
    (block,) = narrowed_equals_masked(model, feed(model), interface=True).blocks
    assert (block.kind, block.units) == ("heads", HEADS)


@pytest.mark.parametrize("output", ["a3", "o0", "q0"])
def test_scores_results_and_features_are_no_cache(output: str) -> None:
    model = attention(outputs=f", float[] {output}")
    survey = narrowed_equals_masked(model, feed(model), interface=True)
    assert not survey.blocks
    assert any(r.reason == "it is an output of the model" for r in survey.refusals)


def test_feature_maps_are_no_cache() -> None:
    model = tiny(
        "float[N,3,4,4] x, float[N,8,2,4] more => float[] y, float[] c",
        "h = Conv(x, w)\nc = Concat<axis=2>(more, h)\ny = Conv(c, v)",
        {"w": (8, 3, 1, 1), "v": (5, 8, 1, 1)},
    )
    survey = narrowed_equals_masked(model, feed(model), interface=True)
    assert not survey.blocks


def test_two_layers_keep_different_heads() -> None:
    """Rotary embedding and attention count their heads in attributes, layer by layer."""
    layer = """
        q$i = MatMul(x$i, wq$i)
        k$i = MatMul(x$i, wk$i)
        v$i = MatMul(x$i, wv$i)
        qr$i = RotaryEmbedding<num_heads=$h>(q$i, cos, sin, ids)
        kr$i = RotaryEmbedding<num_heads=$h>(k$i, cos, sin, ids)
        o$i = Attention<q_num_heads=$h, kv_num_heads=$h>(qr$i, kr$i, v$i)
        x$j = MatMul(o$i, wo$i)
    """
    weights = {t: np.random.default_rng(3).normal(size=(7, 1)).astype(np.float32) for t in ("cos", "sin")}
    for i, count in enumerate((4, 6)):
        weights |= {f"w{p}{i}": (8, 2 * count) for p in "qkv"} | {f"wo{i}": (2 * count, 8)}
    body = "".join(lines(layer, i=i, j=i + 1, h=h) for i, h in enumerate((4, 6)))
    model = tiny(
        f"float[N,{TOKENS},8] x0, int64[N,{TOKENS}] ids => float[] y", f"{body}y = Identity(x2)", weights, opset=23
    )
    for seed in range(2):
        survey = narrowed_equals_masked(model, feed(model), kinds=("heads",), seed=seed)
    heads = [b for b in survey.blocks if b.kind == "heads"]
    assert sorted(b.units for b in heads) == [4, 6]
    dead = np.zeros(survey.ids, dtype=bool)
    dead[heads[0].ids[:3]] = True
    counts = [
        n.attributes["num_heads"].as_int() for n in narrowed(model, survey, dead).graph if "num_heads" in n.attributes
    ]
    assert sorted(counts) == sorted([heads[0].units - 3] * 2 + [heads[1].units] * 2)


def test_packed_operands_that_only_a_gpu_runs() -> None:
    """No numbers here: the processor has no kernel for them, so the facts are written down."""
    shapes = {"x": (2, 5, 6), "p": (2, 5, 24), "r": (2, 5, 4, 3, 2), "z": (2, 5, 8), "y": (2, 5, 3)}
    model = tiny(
        "float[N,5,6] x => float[] y",
        "p = MatMul(x, w)\nr = Reshape(p, five)\nz = com.microsoft.MultiHeadAttention<num_heads=4>(r)\n"
        "y = MatMul(z, wo)",
        {"w": (6, 24), "wo": (8, 3), "five": ints(0, 0, 4, 3, 2)},
        imports={"com.microsoft": 1},
        recorded=False,
    )
    constants = {n: v.const_value.numpy() for n, v in model.graph.initializers.items()}
    facts = Facts(
        shapes=shapes | {n: a.shape for n, a in constants.items()},
        dtypes=dict.fromkeys(shapes, np.dtype(np.float32)) | {n: a.dtype for n, a in constants.items()},
        values=constants,
        constants=frozenset(constants),
        varying={},
    )
    survey = trace(model, facts)
    (block,) = survey.blocks
    assert (block.kind, block.units, block.unit_size) == ("heads", 4, 2)
    assert block.producers[0].index.tolist() == [list(range(6 * h, 6 * h + 6)) for h in range(4)]
    slim = narrowed(model, survey, np.isin(np.arange(survey.ids), block.ids[1:3]))
    (node,) = [n for n in slim.graph if n.op_type == "MultiHeadAttention"]
    assert node.attributes["num_heads"].as_int() == 2
    assert slim.graph.initializers["w"].shape == (6, 12)
