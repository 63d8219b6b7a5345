"""Operators of ONNX Runtime itself, of which no other definition exists: each against the runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.tiny import feed, tiny
from tests.torchgraph.test_program import compared, slope

MS = "com.microsoft."
X = "float[2,5,8] x"
SQUARE = {"w": (8, 8)}
NORM = {"g": (8,), "b": (8,), "c": (8,)}
ANGLES = 0.5 ** np.arange(8)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "matmul": (X, f"y = {MS}FusedMatMul<alpha=0.5>(x, w)", SQUARE),
    "matmul_turned": (X, f"y = {MS}FusedMatMul<transA=1, transB=1>(x, w)", {"w": (7, 5)}),
    "matmul_batch": (X, f"y = {MS}FusedMatMul<transBatchA=1, transBatchB=1, transB=1>(x, w)", {"w": (4, 5, 8)}),
    "skip_norm": (X, f"z = MatMul(x, w)\ny = {MS}SkipLayerNormalization(x, z, g, b, c)", SQUARE | NORM),
    "skip_norm_sum": (
        X, f"z = MatMul(x, w)\nn, , , s = {MS}SkipLayerNormalization(x, z, g)\ny = Add(n, s)", {**SQUARE, "g": (8,)},
    ),
    "skip_rms": (
        X, f"z = MatMul(x, w)\nn, , , s = {MS}SkipSimplifiedLayerNormalization(x, z, g)\ny = Add(n, s)",
        {**SQUARE, "g": (8,)},
    ),
    "rms": (X, "y = SimplifiedLayerNormalization<axis=-1, epsilon=0.01>(x, g)", {"g": (8,)}),
    "bias_gelu": (X, f"y = {MS}BiasGelu(x, g)", {"g": (8,)}),
    "fast_gelu": (X, f"y = {MS}FastGelu(x, g)", {"g": (8,)}),
    "quick_gelu": (X, f"y = {MS}QuickGelu<alpha=1.5>(x)", {}),
    "gelu": (X, f"y = {MS}Gelu(x)", {}),
    "attention": (X, f"y = {MS}Attention<num_heads=2>(x, w, b)", {"w": (8, 24), "b": (24,)}),
    "attention_causal": (
        X, f"y = {MS}Attention<num_heads=2, unidirectional=1>(x, w, b)", {"w": (8, 24), "b": (24,)},
    ),
    "attention_masked": (
        X,
        f"y = {MS}Attention<num_heads=2>(x, w, b, m)",
        {"w": (8, 24), "b": (24,), "m": np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=np.int32)},
    ),
    "multi_head": (
        X,
        f"k = MatMul(x, w)\nv = MatMul(k, w)\ny = {MS}MultiHeadAttention<num_heads=4>(x, k, v, b)",
        {**SQUARE, "b": (24,)},
    ),
    "multi_head_scaled": (
        X,
        f"k = MatMul(x, w)\ny = {MS}MultiHeadAttention<num_heads=2, scale=0.3, unidirectional=1>(x, k, k)",
        SQUARE,
    ),
    "group_query": (
        "float[2,5,64] x",
        f"k = MatMul(x, w)\ny, p, q = {MS}GroupQueryAttention<num_heads=4, kv_num_heads=2>(x, k, k, , , l, t)",
        {"w": (64, 32), "l": np.array([4, 4], dtype=np.int32), "t": np.array([5], dtype=np.int32)},
    ),
    "group_query_rotary": (
        "float[2,5,32] x",
        f"k=MatMul(x, w)\ny, p, q={MS}GroupQueryAttention<num_heads=2,kv_num_heads=1,do_rotary=1>(x,k,k,,,l,t,c,s)",
        {
            "w": (32, 16), "l": np.array([4, 4], dtype=np.int32), "t": np.array([5], dtype=np.int32),
            "c": np.cos(np.outer(np.arange(9), ANGLES)).astype(np.float32),
            "s": np.sin(np.outer(np.arange(9), ANGLES)).astype(np.float32),
        },
    ),
    "rotary": (
        "float[2,5,16] x",
        f"y = {MS}RotaryEmbedding<num_heads=2, interleaved=1>(x, p, c, s)",
        {
            "p": np.arange(10).reshape(2, 5),
            "c": np.cos(np.outer(np.arange(12), [1, 0.1, 0.01, 0.001])).astype(np.float32),
            "s": np.sin(np.outer(np.arange(12), [1, 0.1, 0.01, 0.001])).astype(np.float32),
        },
    ),
    "embed": (
        X,
        f"e, m = {MS}EmbedLayerNormalization(i, j, w, p, k, g, b)\ny = Add(x, e)",
        {
            "i": np.array([[1, 2, 3, 4, 5], [6, 0, 1, 2, 3]], dtype=np.int32),
            "j": np.array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]], dtype=np.int32),
            "w": (7, 8), "p": (9, 8), "k": (2, 8), "g": (8,), "b": (8,),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_fused(name: str) -> None:
    signature, text, weights = CASES[name]
    model = tiny(f"{signature} => float[] y", text, weights, imports={"com.microsoft": 1}, recorded=False)
    given = feed(model)
    assert compared(model, given) < 2e-6
    floats = [n for n, w in weights.items() if isinstance(w, tuple)]
    if floats:
        found, wanted = slope(model, given, floats)
        assert found == pytest.approx(wanted, rel=1e-5)
