"""Cases of the rules in `ops/join.py` and of those that read sizes."""

from __future__ import annotations

import numpy as np

from tests.contract.rule_case import Case
from tests.tiny import ints, scalar

RUNTIME = "computed at run time"
FULL = "another tensor of the same width that cannot be narrowed"
MANY = (0.25, 0.6, 0.9)  # few, an uneven number and all but one unit

JOIN = [
    Case(op="Concat", body="z = Concat<axis=1>(h, g)", width=16, units=(8, 8)),
    Case(op="Concat", body="z = Concat<axis=-1>(h, x2)", inputs="float[N,4] x2", width=12, note="with-input"),
    Case(op="Concat", body="z = Concat<axis=-1>(h, h)", width=16, note="twice"),
    Case(op="Concat", body="z = Concat<axis=1>(h, g)", frame="tokens", note="along-tokens"),
    Case(op="Concat", body="z = Concat<axis=0>(h, c)", weights={"c": (1, 8)}, note="constant-row"),
    Case(
        op="Concat",
        body="z = Concat<axis=1>(h, x2)",
        inputs="float[N,2,8] x2",
        frame="tokens",
        units=(),
        refused="another piece of the Concat",
        note="along-input",
    ),
    Case(
        op="Split",
        ratios=MANY,
        body="p, q = Split<axis=1, num_outputs=2>(h)\nz = Mul(p, q)",
        width=4,
        units=(4,),
        note="gate",
    ),
    Case(
        op="Split",
        ratios=MANY,
        body="p, q = Split<axis=-1>(h, s)\nr = Relu(p)\nz = Concat<axis=-1>(q, r)",
        weights={"s": ints(3, 5)},
        note="sizes",
    ),
    Case(
        op="Split",
        ratios=MANY,
        body="p, q, r = Split<axis=1, num_outputs=3>(h)\ns = Relu(p)\nz = Concat<axis=1>(r, s)",
        width=5,
        units=(5,),
        note="uneven",
    ),
    Case(
        op="Split",
        ratios=MANY,
        body="p, q = Split<axis=1, split=[2,6]>(h)\nr = Relu(q)\nz = Concat<axis=1>(p, r)",
        opset=11,
        note="attribute",
    ),
    Case(
        op="Split",
        ratios=MANY,
        body="p, q = Split<axis=1>(h)\nr = Relu(q)\nz = Concat<axis=1>(p, r)",
        opset=11,
        note="default-11",
    ),
    Case(
        op="Split",
        ratios=MANY,
        body="p, q = Split<axis=1>(h)\nr = Relu(q)\nz = Concat<axis=1>(p, r)",
        opset=13,
        note="default-13",
    ),
    Case(
        op="Gather",
        body="z = Gather<axis=1>(h, i)",
        weights={"i": ints(3, 0, -1, 5)},
        width=4,
        units=(4,),
        note="channels",
    ),
    Case(op="Gather", body="z = Gather<axis=1>(h, i)", weights={"i": ints(7, 6, 5, 4, 3, 2, 1, 0)}, note="permuted"),
    Case(op="Gather", body="z = Gather<axis=1>(h, i)", weights={"i": np.array(2)}, frame="tokens", note="one-token"),
    Case(op="Gather", body="z = Gather<axis=1>(h, i)", weights={"i": ints(1, 1, 0)}, frame="tokens", note="tokens"),
    Case(
        op="Gather",
        body="e = Gather(v, ids)\nz = Add(h, e)",
        weights={"v": (7, 8)},
        inputs="int64[N,5] ids",
        frame="tokens",
        note="embedding",
    ),
    Case(
        op="Gather",
        body="z = Gather<axis=1>(h, ids)",
        inputs="int64[4] ids",
        width=4,
        units=(),
        refused=RUNTIME,
        note="from-input",
    ),
    Case(
        op="Gather",
        body="b = Greater(h, c)\ni = Cast<to=7>(b)\ne = Gather(v, i)\nr = ReduceSum<keepdims=0>(e, a)\nz = Mul(h, r)",
        weights={"v": (7, 8), "c": scalar(0), "a": ints(1)},
        units=(),
        refused="something else than channels",
        note="index-from-channels",
    ),
    Case(
        op="Gather",
        body="e = Gather<axis=1>(h, i)\nz = ReduceSum<keepdims=0>(e, a)",
        width=4,
        units=(4,),
        note="2-d-index",
        weights={"i": np.array([[0, 1, 2, 3], [4, 5, 6, 7]]), "a": ints(1)},
    ),
    Case(op="GatherND", body="z = GatherND(h, i)", weights={"i": np.array([[0], [2]])}, frame="tokens", note="rows"),
    Case(
        op="GatherND",
        body="g0 = GatherND<batch_dims=1>(h, i)\nz = Unsqueeze(g0, a)",
        weights={"i": ints(1, 0, 2)[:, None], "a": ints(0)},
        width=3,
        units=(),
        refused=RUNTIME,
        note="channels",
    ),
    Case(
        op="GatherND",
        body="t = Transpose(h)\nq = GatherND(t, i)\nz = Transpose(q)",
        weights={"i": np.array([[3], [0], [-1], [5]])},
        width=4,
        units=(4,),
        note="constant",
    ),
    Case(
        op="GatherND",
        body="t = Transpose(h)\nv = Reshape(t, s)\nq = GatherND(v, i)\nz = Transpose(q)",
        weights={"s": ints(2, 4, -1), "i": np.array([[0, 3], [1, 1], [1, -2], [0, 0]])},
        width=4,
        units=(4,),
        note="two-deep",
    ),
    Case(
        op="GatherND",
        body="e = GatherND(v, ids)\nz = Add(h, e)",
        weights={"v": (7, 8)},
        inputs="int64[N,5,1] ids",
        frame="tokens",
        note="embedding",
    ),
    Case(
        op="GatherND",
        domain="com.microsoft",
        body="z = com.microsoft.GatherND(h, i)",
        weights={"i": np.array([[0], [2]])},
        frame="tokens",
    ),
    Case(
        op="GatherND",
        body="z = GatherND<batch_dims=1>(h, i)",
        weights={"i": np.array([[[0], [4]], [[1], [1]], [[2], [3]]])},
        frame="tokens",
        note="batched-rows",
    ),
]

SIZES = [
    Case(op="Shape", body="s = Shape(h)\nr = Relu(h)\nz = Reshape(r, s)"),
    Case(op="Size", body="s = Size(h)\nm = Min(s, o)\nf = Cast<to=1>(m)\nz = Div(h, f)", weights={"o": np.array(2)}),
    Case(
        op="Range",
        body="s = Shape<start=1, end=2>(h)\nt = Squeeze(s)\np = Range(o, t, i)\ne = Gather(v, p)\nz = Add(h, e)",
        weights={"o": np.array(0), "i": np.array(1), "v": (9, 8)},
        frame="tokens",
    ),
    Case(
        op="ConstantOfShape",
        body="s = Shape(h)\nc = ConstantOfShape<value = float[1] {2.0}>(s)\nz = Mul(h, c)",
    ),
    Case(
        op="ConstantOfShape",
        body="s = Shape<end=1>(x)\nt = Concat<axis=0>(s, o)\nc = ConstantOfShape<value = float[1] {2.0}>(t)\n"
        "a = Mul(h, c)\nb = Concat<axis=1>(c, a)\nz = MatMul(b, v)\nd = Neg(c)\nz1 = Sub(d, g)\nz2 = MatMul(z1, u)",
        weights={"o": ints(8), "v": (16, 6), "u": (8, 6)},
        outputs=", float[] z2",
        width=6,
        units=(6, 8, 8),
        note="state",
    ),
    Case(
        op="ConstantOfShape",
        body="s = Shape<end=1>(x)\nt = Concat<axis=0>(o, s)\nc = ConstantOfShape<value = float[1] {2.0}>(t)\n"
        "d = Transpose(c)\ne = Slice(d, one, two, one)\nf = Expand(e, b)\nz = Mul(h, f)",
        weights={"o": ints(9), "one": ints(1), "two": ints(9), "b": ints(1, 8)},
        note="through-copies",
    ),
    Case(
        op="Expand",
        body="s = Shape(h)\nc = Expand(level, s)\nz = Max(h, c)",
        weights={"level": np.array(0.1, np.float32)},
        frame="tokens",
        note="full-like",
    ),
    Case(
        op="Expand",
        body="s = Shape<end=1>(x)\nt = Concat<axis=0>(s, o)\nc = Expand(one, t)\nz = Mul(h, c)",
        weights={"o": ints(8), "one": np.array([[3]], np.float32)},
        note="filled",
    ),
    Case(
        op="Expand",
        body="s = Shape<end=1>(x)\nt = Concat<axis=0>(s, o)\nc = Expand(row, t)\nz = Mul(h, c)",
        weights={"o": ints(8), "row": (1, 8)},
        note="row",
    ),
    Case(
        op="ConstantOfShape",
        body="s = Shape<end=1>(x)\nt = Concat<axis=0>(s, o)\nc = ConstantOfShape(t)\n"
        "h1 = Unsqueeze(h, one)\nb = Concat<axis=1>(c, h1)\nz = ReduceMax<keepdims=0>(b, one)",
        weights={"o": ints(2, 8), "one": ints(1)},
        note="rows-in-front",
    ),
    Case(
        op="ConstantOfShape",
        body="s = Shape<end=1>(x)\nt = Concat<axis=0>(s, o)\nc = ConstantOfShape(t)\n"
        "a = Concat<axis=1>(h, c)\nb = MatMul(a, both)\ng1 = Tanh(b)\nd = Concat<axis=1>(h, g1)\n"
        "e = MatMul(d, both)\nz = Tanh(e)",
        weights={"o": ints(8), "both": (16, 8)},
        units=(8, 8),
        note="cell",
    ),
    Case(
        op="ConstantOfShape",
        body="s = Shape<end=1>(h)\nt = Concat<axis=0>(s, o)\nc = ConstantOfShape(t)\nz = Add(h, c)",
        weights={"o": ints(1)},
        note="rows",
    ),
    Case(op="EyeLike", body="e = EyeLike(h)\nz = Add(h, e)", units=(), refused=FULL, by="Add"),
    Case(
        op="NonZero",
        body="i = NonZero(h)\nt = Transpose(i)\nv = GatherND(h, t)\nr = Shape<end=2>(h)\nq = Reshape(v, r)\n"
        "z = Add(h, q)",
        units=(),
        refused="where there are nonzero values",
    ),
]

CASES = [
    Case(
        op="Concat",
        body="p = Concat<axis=1>(x, zeros)\nq = MatMul(p, v)\nr = Tanh(q)\ns = Concat<axis=1>(x, r)\nt = MatMul(s, v)\n"
        "z = Add(h, t)",
        weights={"zeros": (3, 8), "v": (14, 8)},
        note="first-state",
    ),
    Case(
        op="Concat",
        body="p = Concat<axis=1>(h, zeros)\nq = MatMul(p, v)\nr = Tanh(q)\ns = Concat<axis=1>(h, r)\nz = MatMul(s, v)",
        weights={"zeros": (3, 6), "v": (14, 6)},
        width=6,
        units=(6, 8),
        note="constant-state",
    ),
    *JOIN,
    *SIZES,
]
