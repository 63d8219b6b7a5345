"""Tiny pre-norm transformers, in which a residual stream is read by normalizations and matrices alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from tests.tiny import VOCABULARY, drawn, ints, lines, scalar, tiny

WIDTH, HIDDEN = 12, 40

STATISTICS = """
        a$i = ReduceMean <keepdims=1> ($x, last)
        c$i = Sub($x, a$i)
        q$i = Mul(c$i, c$i)
        m$i = ReduceMean <keepdims=1> (q$i, last)"""
INVERSE = """
        e$i = Add(m$i, small)
        r$i = Sqrt(e$i)
        v$i = Reciprocal(r$i)"""
FORMS = {
    "LayerNormalization": "$y = LayerNormalization <axis=-1, epsilon=0.001> ($x, g$i, s$i)",
    "RMSNormalization": "$y = SimplifiedLayerNormalization <axis=-1, epsilon=0.001> ($x, g$i)",
    "written out": """
        q$i = Mul($x, $x)
        m$i = ReduceMean <keepdims=1> (q$i, last)
        e$i = Add(m$i, small)
        r$i = Sqrt(e$i)
        u$i = Div($x, r$i)
        $y = Mul(u$i, g$i)""",
    "no epsilon": """
        q$i = Mul($x, $x)
        m$i = ReduceMean <keepdims=1> (q$i, last)
        r$i = Sqrt(m$i)
        v$i = Reciprocal(r$i)
        u$i = Mul($x, v$i)
        $y = Mul(u$i, g$i)""",
    "reciprocal": """
        q$i = Pow($x, two)
        m$i = ReduceMean <keepdims=1> (q$i, last)
        e$i = Add(small, m$i)
        r$i = Sqrt(e$i)
        v$i = Reciprocal(r$i)
        u$i = Mul(v$i, $x)
        $y = Mul(g$i, u$i)""",
    "in double": """
        l$i = Cast <to=11> ($x)
        q$i = Mul(l$i, l$i)
        m$i = ReduceMean <keepdims=1> (q$i, last)
        e$i = Add(m$i, small_wide)
        r$i = Sqrt(e$i)
        v$i = Div(l$i, r$i)
        u$i = Cast <to=1> (v$i)
        $y = Mul(u$i, g$i)""",
    "written out layer norm": """
        a$i = ReduceMean <keepdims=1> ($x, last)
        c$i = Sub($x, a$i)
        q$i = Pow(c$i, two)
        m$i = ReduceMean <keepdims=1> (q$i, last)
        e$i = Add(m$i, small)
        r$i = Pow(e$i, half)
        u$i = Div(c$i, r$i)
        w$i = Mul(u$i, g$i)
        $y = Add(w$i, s$i)""",
    "Flax": """
        a$i = ReduceMean <keepdims=1> ($x, last)
        c$i = Sub($x, a$i)
        q$i = Mul($x, $x)
        m$i = ReduceMean <keepdims=1> (q$i, last)
        b$i = Mul(a$i, a$i)
        t$i = Sub(m$i, b$i)
        l$i = Max(t$i, none)
        e$i = Add(l$i, small)
        r$i = Sqrt(e$i)
        u$i = Div(c$i, r$i)
        w$i = Mul(u$i, g$i)
        $y = Add(w$i, s$i)""",
    "TensorFlow": STATISTICS
    + INVERSE
    + """
        gv$i = Mul(v$i, g$i)
        u$i = Mul($x, gv$i)
        w$i = Mul(a$i, gv$i)
        sh$i = Sub(s$i, w$i)
        $y = Add(u$i, sh$i)""",
    "TensorFlow, pooled": """
        a$i = GlobalAveragePool($x)
        n$i = Neg(a$i)
        c$i = Sub($x, a$i)
        q$i = Mul(c$i, c$i)
        m$i = GlobalAveragePool(q$i)"""
    + INVERSE
    + """
        gv$i = Mul(v$i, g$i)
        u$i = Mul($x, gv$i)
        w$i = Mul(n$i, gv$i)
        sh$i = Add(w$i, s$i)
        $y = Add(u$i, sh$i)""",
    "TensorFlow, no shift": STATISTICS
    + INVERSE
    + """
        u$i = Mul($x, v$i)
        w$i = Mul(a$i, v$i)
        $y = Sub(u$i, w$i)""",
    "TensorFlow, root mean square": """
        q$i = Pow($x, two)
        m$i = ReduceMean <keepdims=1> (q$i, last)"""
    + INVERSE
    + """
        gv$i = Mul(v$i, g$i)
        $y = Mul($x, gv$i)""",
}

BEGINS = {
    "table": ("int64[N,S] ids", "x0 = Gather(table, ids)"),
    "positions": ("int64[N,5] ids", "t0 = Gather(table, ids)\nx0 = Add(t0, places)"),
    "picture": (
        "float[N,2,4,4] x",
        """
        p0 = Conv <kernel_shape=[2,2], strides=[2,2]> (x, patches, patch_bias)
        p1 = Reshape(p0, flat)
        p2 = Transpose <perm=[0,2,1]> (p1)
        p4 = Shape <start=0, end=1> (x)
        p5 = Concat <axis=0> (p4, one_token)
        p3 = Expand(token, p5)
        x0 = Concat <axis=1> (p3, p2)""",
    ),
    "waves": (
        "float[N,6,S] x",
        """
        c0 = Conv <kernel_shape=[1]> (x, kernel, patch_bias)
        c1 = Relu(c0)
        c2 = Mul(c1, half)
        x0 = Transpose <perm=[0,2,1]> (c2)""",
    ),
    "activation": ("float[N,S,6] x", "b0 = MatMul(x, stem)\nx0 = Relu(b0)"),
}
ENDS = {
    "scores": ("float[] y", "y = MatMul($z, head)"),
    "first token": ("float[] y", "f0 = Gather <axis=1> ($z, zero)\ny = Gemm <transB=1> (f0, headT, head_bias)"),
    "tied": ("float[] y", "f0 = Transpose <perm=[1,0]> (table)\ny = MatMul($z, f0)"),
    "normalized": ("float[] y", "y = Identity($z)"),
    "normalized and scores": ("float[] z, float[] y", "y = MatMul($z, head)"),
}


LAYER = """
    $first
    sq$i = MatMul(y$e, query$i)
    sk$i = MatMul(y$e, key$i)
    st$i = Transpose <perm=[0,2,1]> (sk$i)
    ss$i = MatMul(sq$i, st$i)
    sp$i = Softmax(ss$i)
    k$i = MatMul(y$e, mix_in$i)
    o$i = MatMul(sp$i, k$i)
    d$i = MatMul(o$i, mix_out$i)
    db$i = Add(d$i, mix_bias$i)
    $scaled
    mid$i = Add(x$i, $written)
    $second
    h$i = MatMul(y$o, up$i)
    hb$i = Add(h$i, up_bias$i)
    hr$i = Relu(hb$i)
    hd$i = MatMul(hr$i, down$i)
    x$j = Add(mid$i, hd$i)"""


def prenorm(
    form: str = "LayerNormalization",
    begin: str = "table",
    end: str = "scores",
    *,
    depth: int = 1,
    scaled: str = "",
) -> ir.Model:
    """Layers of attention and an MLP, each of which reads the stream through a normalization.

    `scaled` are nodes that scale what attention writes, from db$i to ds$i.
    """
    body, weights = BEGINS[begin][1], _weights(begin, end)
    rng = np.random.default_rng(7)
    for i in range(depth):
        first = lines(FORMS[form], x=f"x{i}", y=f"y{2 * i}", i=2 * i)
        second = lines(FORMS[form], x=f"mid{i}", y=f"y{2 * i + 1}", i=2 * i + 1)
        body += lines(
            LAYER,
            first=first,
            second=second,
            written=f"ds{i}" if scaled else f"db{i}",
            scaled=lines(scaled, i=i),
            i=i,
            j=i + 1,
            e=2 * i,
            o=2 * i + 1,
        )
        weights |= {
            f"query{i}": (WIDTH, 4),
            f"key{i}": (WIDTH, 4),
            f"mix_in{i}": (WIDTH, 6),
            f"mix_out{i}": (6, WIDTH),
            f"mix_bias{i}": (WIDTH,),
            f"scale{i}": (WIDTH,),
            f"up{i}": (WIDTH, HIDDEN),
            f"up_bias{i}": (HIDDEN,),
            f"down{i}": (HIDDEN, WIDTH),
        }
    body += "\n" + lines(FORMS[form], x=f"x{depth}", y="z", i=2 * depth) + "\n" + lines(ENDS[end][1], z="z")
    for i in range(2 * depth + 1):
        weights |= {f"g{i}": (1 + 0.3 * rng.normal(size=WIDTH)).astype(np.float32), f"s{i}": drawn(rng, (WIDTH,))}
    used = {name: array for name, array in weights.items() if _read(name, body)}
    return tiny(f"{BEGINS[begin][0]} => {ENDS[end][0]}", body, used)


def _weights(begin: str, end: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "table": (VOCABULARY, WIDTH),
        "places": (5, WIDTH),
        "patches": (WIDTH, 2, 2, 2),
        "patch_bias": (WIDTH,),
        "flat": ints(0, WIDTH, 4),
        "one_token": ints(1, WIDTH),
        "token": (1, 1, WIDTH),
        "stem": (6, WIDTH),
        "kernel": (WIDTH, 6, 1),
        "head": (WIDTH, 5),
        "headT": (5, WIDTH),
        "head_bias": (5,),
        "zero": np.array(0, dtype=np.int64),
        "last": ints(-1),
        "small": scalar(0.001),
        "small_wide": np.array(0.001),
        "two": scalar(2),
        "half": scalar(0.5),
        "none": scalar(0),
    }
    return found


def _read(name: str, body: str) -> bool:
    words = body.replace("(", " ").replace(")", " ").replace(",", " ").split()
    return name in words
