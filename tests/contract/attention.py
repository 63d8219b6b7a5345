"""Builder of one attention layer: projections, the split into heads and the merge vary, the middle mostly stays."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxgrail.core import Array
from tests.tiny import Weights, ints, lines, scalar, tiny

TOKENS, HEADS, SIZE = 5, 4, 2
WIDTH = HEADS * SIZE

PROJECTIONS = "".join(lines("$p0 = MatMul(x, w$p)\n$p1 = Add(b$p, $p0)\n", p=p) for p in "qkv")
PROJECTED: dict[str, tuple[int, ...]] = {
    **{f"w{p}": (WIDTH, WIDTH) for p in "qkv"},
    **{f"b{p}": (WIDTH,) for p in "qkv"},
}
SPLIT = "".join(
    lines("$p2 = Reshape$flags($p1, into)\n$p3 = Transpose<perm=[0,2,1,3]>($p2)\n", p=p, flags="") for p in "qkv"
)
SCORES = """
    k4 = Transpose<perm=[0,1,3,2]>(k3)
    a0 = MatMul(q3, k4)
    a1 = Mul(a0, scale)
"""
SOFTMAX = """
    a3 = Softmax<axis=-1>(a2)
    o0 = MatMul(a3, v3)
"""
MERGE = """
    o1 = Transpose<perm=[0,2,1,3]>(o0)
    o2 = Reshape(o1, back)
"""
OUT = "y = MatMul(o2, wo)"
BATCH_AND_TOKENS = "b = Shape<start=0, end=1>(x)\ns = Shape<start=1, end=2>(x)\n"

SHAPES: dict[str, tuple[str, dict[str, Array]]] = {
    # dynamo, dynamic axes: one shape tensor for q, k and v; the head count adapts itself
    "dynamic": (
        f"{BATCH_AND_TOKENS}into = Concat<axis=0>(b, s, minus, size)\nback = Concat<axis=0>(b, s, minus)\n",
        {"minus": ints(-1), "size": ints(SIZE)},
    ),
    # dynamo, fixed number of tokens: the free dimension is the batch
    "vision": ("", {"into": ints(-1, TOKENS, HEADS, SIZE), "back": ints(-1, TOKENS, WIDTH)}),
    "copied": ("", {"into": ints(0, 0, HEADS, SIZE), "back": ints(0, 0, WIDTH)}),
    "tokens-free": ("", {"into": ints(0, -1, HEADS, SIZE), "back": ints(0, -1, WIDTH)}),
    # OPT: head count and width baked into computed shapes
    "baked": (
        f"{BATCH_AND_TOKENS}into = Concat<axis=0>(b, s, heads, size)\nback = Concat<axis=0>(b, s, width)\n",
        {"heads": ints(HEADS), "size": ints(SIZE), "width": ints(WIDTH)},
    ),
    # DeBERTa: the size of a head is the free dimension
    "size-free": (
        f"{BATCH_AND_TOKENS}into = Concat<axis=0>(b, s, heads, minus)\nback = Concat<axis=0>(b, s, minus)\n",
        {"heads": ints(HEADS), "minus": ints(-1)},
    ),
    # TorchScript: the width of the merged heads is computed from the heads
    "multiplied": (
        f"""{BATCH_AND_TOKENS}
        into = Concat<axis=0>(b, s, heads, size)
        n = Shape<start=1, end=2>(o0)
        d = Shape<start=3, end=4>(o0)
        w = Mul(n, d)
        back = Concat<axis=0>(b, s, w)
        """,
        {"heads": ints(HEADS), "size": ints(SIZE)},
    ),
}


def attention(
    *,
    shapes: str = "vision",
    inputs: str = f"float[N,{TOKENS},{WIDTH}] x",
    outputs: str = "",
    project: str = PROJECTIONS + SPLIT,
    scores: str = SCORES,
    mask: str = "a2 = Identity(a1)",
    softmax: str = SOFTMAX,
    merge: str = MERGE,
    out: str = OUT,
    weights: Weights | None = None,
    projected: Weights | None = None,
    opset: int = 20,
    imports: Mapping[str, int] | None = None,
) -> ir.Model:
    """One layer; every stage is node text, and what it needs is in `weights`.

    `projected` are the weights of the projections, `shapes` a key of `SHAPES` (its merge may read what comes before).
    """
    text, constants = SHAPES[shapes]
    early, late = text.split("n = Shape", 1) if "n = Shape" in text else (text, "")
    late = f"n = Shape{late}" if late else ""
    body = "\n".join([early, project, scores, mask, softmax, late, merge, out])
    given: dict[str, tuple[int, ...] | Array] = {"scale": scalar(0.7), "wo": (WIDTH, 5)}
    given |= dict(PROJECTED if projected is None else projected) | constants | dict(weights or {})
    used = {name: weight for name, weight in given.items() if name in _words(body)}
    return tiny(f"{inputs} => float[] y{outputs}", body, used, opset=opset, imports=imports)


def _words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() or c == "_" else " " for c in text).split())
