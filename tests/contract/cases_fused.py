"""Cases of the rules in `ops/attention.py` and `ops/fused.py`."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.contract.rule_case import Case
from tests.tiny import ints

MIXED = "mixes the whole channel axis"
CACHE = "key-value cache"
PARTIAL = "do not all carry heads"

Microsoft = partial(Case, domain="com.microsoft", frame="tokens")
Standard = partial(Case, opset=23, frame="tokens")

THIRD = "v = MatMul(x, wv)\n"  # h and g are the query and the key
APART = "".join(f"{n}r = Reshape({n}, apart)\n{n}h = Transpose<perm=[0,2,1,3]>({n}r)\n" for n in "hgv")
MOVED = "".join(f"{n}s = Transpose<perm=[1,0,2]>({n})\n{n}r = Reshape({n}s, apart)\n" for n in "hgv")
TOGETHER = "t = Transpose<perm=[0,2,1,3]>(o)\nz = Reshape(t, joined)"
SHAPES = {"apart": ints(0, 0, 4, 2), "joined": ints(0, 0, 8)}
ANGLES = {t: np.random.default_rng(3).normal(size=(7, 1)).astype(np.float32) for t in ("cos", "sin")}
SHARED = "k = MatMul(x, wk)\nv = MatMul(x, wv)\n"  # two key-value heads

ATTENTION = [
    Standard(
        op="Attention",
        body=f"{THIRD}z = Attention<q_num_heads=4, kv_num_heads=4>(h, g, v)",
        weights={"wv": (6, 8)},
        units=(4,),
    ),
    Standard(
        op="Attention",
        body=f"{SHARED}z = Attention<q_num_heads=4, kv_num_heads=2>(h, k, v)",
        weights={"wk": (6, 4), "wv": (6, 4)},
        units=(2,),
        note="shared-heads",
    ),
    Standard(
        op="Attention",
        body=f"{THIRD}{APART}o = Attention<scale=0.3>(hh, gh, vh, bias)\n{TOGETHER}",
        weights={"wv": (6, 8), "bias": (1, 4, 5, 5), **SHAPES},
        units=(4,),
        note="4-d-biased",
    ),
    Standard(
        op="Attention",
        body=f"{THIRD}{APART}o = Attention(hh, gh, vh, mask)\n{TOGETHER}",
        weights={"wv": (6, 8), **SHAPES},
        inputs="bool[N,1,5,5] mask",
        units=(4,),
        note="4-d-masked",
    ),
    Standard(
        op="Attention",
        body=f"{THIRD}{APART}o, pk, pv = Attention(hh, gh, vh, , past_k, past_v)\n{TOGETHER}",
        weights={"wv": (6, 8), **SHAPES},
        inputs="float[N,4,3,2] past_k, float[N,4,3,2] past_v",
        units=(),
        refused=CACHE,
        note="cached",
    ),
    Standard(
        op="Attention",
        body="z = Attention<q_num_heads=4, kv_num_heads=4>(h, m, m)",
        inputs="float[N,5,8] m",
        units=(),
        refused=PARTIAL,
        note="memory-from-input",
    ),
    Standard(
        op="RotaryEmbedding",
        body="z = RotaryEmbedding<num_heads=4>(h, cos, sin, ids)",
        weights=ANGLES,
        inputs="int64[N,5] ids",
        units=(4,),
    ),
    Standard(
        op="RotaryEmbedding",
        body="hr = Reshape(h, apart)\nhh = Transpose<perm=[0,2,1,3]>(hr)\no = RotaryEmbedding(hh, cos, sin, ids)\n"
        + TOGETHER,
        weights={**ANGLES, **SHAPES},
        inputs="int64[N,5] ids",
        units=(4,),
        note="4-d",
    ),
    Microsoft(
        op="RotaryEmbedding",
        body="z = com.microsoft.RotaryEmbedding<num_heads=4>(h, ids, cos, sin)",
        weights=ANGLES,
        inputs="int64[N,5] ids",
        units=(4,),
    ),
    Microsoft(
        op="MultiHeadAttention",
        body=f"{THIRD}z = com.microsoft.MultiHeadAttention<num_heads=4>(h, g, v, b)",
        weights={"wv": (6, 8), "b": (24,)},
        units=(4,),
    ),
    Microsoft(
        op="MultiHeadAttention",
        body=f"{THIRD}z = com.microsoft.MultiHeadAttention<num_heads=4>(h, g, v, , , bias)",
        weights={"wv": (6, 8), "bias": (1, 4, 5, 5)},
        units=(4,),
        note="biased-scores",
    ),
    Microsoft(
        op="Attention",
        body="z = com.microsoft.Attention<num_heads=4>(h, w, b)",
        weights={"w": (8, 24), "b": (24,)},
        units=(4, 8),
    ),
    Microsoft(
        op="Attention",
        body="z = com.microsoft.Attention<num_heads=2, qkv_hidden_sizes=[4,4,8]>(h, w, b)",
        weights={"w": (8, 16), "b": (16,)},
        units=(2, 8),
        note="sizes",
    ),
]

FUSED = [
    Microsoft(op="Gelu", body="z = com.microsoft.Gelu(h)"),
    Microsoft(op="BiasGelu", body="z = com.microsoft.BiasGelu(h, c)", weights={"c": (8,)}),
    Microsoft(op="FastGelu", body="z = com.microsoft.FastGelu(h, c)", weights={"c": (8,)}),
    Microsoft(op="FastGelu", body="z = com.microsoft.FastGelu(h)", note="no-bias"),
    Microsoft(
        op="FusedMatMul",
        body="z = com.microsoft.FusedMatMul<transB=1, alpha=0.5>(h, v)",
        weights={"v": (6, 8)},
        width=6,
        units=(6, 8),
    ),
    Microsoft(
        op="FusedMatMul",
        body=f"{THIRD}{APART}a = com.microsoft.FusedMatMul<transB=1, alpha=0.7>(hh, gh)\np = Softmax(a)\n"
        f"o = MatMul(p, vh)\n{TOGETHER}",
        weights={"wv": (6, 8), **SHAPES},
        units=(4,),
        note="scores",
    ),
    Microsoft(
        op="FusedMatMul",
        body="t = Transpose<perm=[0,2,1]>(h)\nz = com.microsoft.FusedMatMul<transA=1>(t, v)",
        weights={"v": (8, 6)},
        width=6,
        units=(6, 8),
        note="first-transposed",
    ),
    Microsoft(
        op="FusedMatMul",
        body="z = com.microsoft.FusedMatMul<transA=1>(v, h)",
        weights={"v": (5, 5)},
        note="constant-first",
    ),
    Microsoft(
        op="FusedMatMul",
        body="z = com.microsoft.FusedMatMul<transB=1>(v, h)",
        weights={"v": (6, 8)},
        width=5,
        units=(8,),
        note="constant-first-consumes",
    ),
    Microsoft(
        op="FusedMatMul",
        body="z = com.microsoft.FusedMatMul<transB=1>(h, v)",
        weights={"v": (1, 6, 8)},
        width=6,
        units=(6, 8),
        note="batched-constant",
    ),
    Microsoft(
        op="FusedMatMul",
        body="t = Transpose<perm=[1,0,2]>(h)\np = com.microsoft.FusedMatMul<transBatchA=1>(t, v)\nz = Softplus(p)",
        weights={"v": (1, 8, 6)},
        width=6,
        units=(6, 8),
        note="batched-constant-moved",
    ),
    Microsoft(
        op="FusedMatMul",
        body=f"{THIRD}{MOVED}a = com.microsoft.FusedMatMul<transB=1, transBatchA=1, transBatchB=1>(hr, gr)\n"
        "p = Softmax(a)\no = com.microsoft.FusedMatMul<transBatchB=1>(p, vr)\nt = Transpose<perm=[1,0,2]>(o)\n"
        "q = Reshape(t, joined)\nz = Transpose<perm=[1,0,2]>(q)",
        weights={"wv": (6, 8), "apart": ints(5, -1, 2), "joined": ints(5, -1, 8)},
        units=(4,),
        note="batches-moved",
    ),
    Microsoft(
        op="FusedMatMul",
        body=f"{THIRD}{MOVED}gt = Transpose<perm=[2,1,0]>(gr)\n"
        "a = com.microsoft.FusedMatMul<transBatchA=1, transBatchB=1>(hr, gt)\n"
        "p = Softmax<axis=1>(a)\nu = Transpose<perm=[1,0,2]>(p)\n"
        "o = com.microsoft.FusedMatMul<transA=1, transBatchA=1, transBatchB=1>(u, vr)\n"
        "t = Transpose<perm=[1,0,2]>(o)\nq = Reshape(t, joined)\nz = Transpose<perm=[1,0,2]>(q)",
        weights={"wv": (6, 8), "apart": ints(5, -1, 2), "joined": ints(5, -1, 8)},
        units=(4,),
        note="batches-moved-transposed",
    ),
    Microsoft(
        op="SkipLayerNormalization",
        body="z = com.microsoft.SkipLayerNormalization(h, g, c, d)",
        weights={"c": (8,), "d": (8,)},
        units=(),
        refused=MIXED,
    ),
    Microsoft(
        op="SkipLayerNormalization",
        body="o, , , sum = com.microsoft.SkipLayerNormalization(h, g, c, d, b)\nz = Add(o, sum)",
        weights={"c": (8,), "d": (8,), "b": (8,)},
        units=(),
        refused=MIXED,
        note="biased-with-sum",
    ),
    Microsoft(
        op="SkipLayerNormalization",
        body="t = Transpose<perm=[0,2,1]>(h)\nu = Transpose<perm=[0,2,1]>(g)\n"
        "o, , , sum = com.microsoft.SkipLayerNormalization(t, u, c, d, b)\ns = Add(o, sum)\n"
        "z = Transpose<perm=[0,2,1]>(s)",
        weights={"c": (5,), "d": (5,), "b": (5,)},
        note="over-tokens",
    ),
    Microsoft(
        op="EmbedLayerNormalization",
        body="e, m = com.microsoft.EmbedLayerNormalization(ids, , words, places, , c, d)\nz = Add(h, e)",
        weights={"words": (7, 8), "places": (9, 8), "c": (8,), "d": (8,)},
        inputs="int32[N,5] ids",
        units=(),
        refused="another tensor of the same width",
        by="Add",
    ),
    Microsoft(
        op="TransposeMatMul",
        body="z = com.microsoft.TransposeMatMul<transB=1>(h, v)",
        weights={"v": (6, 8)},
        width=6,
        units=(6, 8),
    ),
    Microsoft(
        op="SkipSimplifiedLayerNormalization",
        body="z = com.microsoft.SkipSimplifiedLayerNormalization(h, g, c)",
        weights={"c": (8,)},
        units=(),
        refused=MIXED,
    ),
]

CASES = [*ATTENTION, *FUSED]
