"""Cases of the rules in `ops/linear.py` and `ops/conv.py`."""

from __future__ import annotations

import numpy as np

from tests.contract.rule_case import Case
from tests.tiny import ints

APART, JOINED = ints(0, 5, 4, 2), ints(0, 5, 8)
EINSUM = [
    Case(
        op="Einsum",
        body="r = Reshape(h, apart)\ns = Reshape(g, apart)\n"
        'a = Einsum<equation="bthd, bshd -> bhts">(r, s)\nb = Softmax(a)\n'
        'c = Einsum<equation="bhts,bshd->bthd">(b, s)\nz = Reshape(c, joined)',
        weights={"apart": APART, "joined": JOINED},
        frame="tokens",
        units=(4,),
        note="heads",
    ),
    Case(op="Einsum", body='z = Einsum<equation="bc">(h)', note="no-arrow"),
    Case(op="Einsum", body='t = Einsum<equation="btc->bct">(h)\nz = Transpose<perm=[0,2,1]>(t)', frame="tokens"),
    Case(
        op="Einsum",
        body='a = Einsum<equation="btc->bt">(h)\nb = Unsqueeze(a, last)\nz = Mul(b, s)',
        weights={"last": ints(2), "s": (8,)},
        frame="tokens",
        units=(),
        refused="contracted with another activation",
        note="summed",
    ),
    Case(
        op="Einsum",
        body='z = Einsum<equation="...c,...c->...c">(h, g)',
        frame="tokens",
        units=(),
        refused="ellipsis",
        note="ellipsis",
    ),
    Case(
        op="Einsum",
        body='z = Einsum<equation="bc,cd->bd">(h, v)',
        weights={"v": (8, 8)},
        units=(),
        refused="constant operand",
        note="constant",
    ),
]

LINEAR = [
    *EINSUM,
    Case(
        op="MatMul",
        body="r = Reshape(h, apart)\np = MatMul(r, v)\nz = Reshape(p, joined)",
        weights={"apart": ints(0, 5, 4, 2), "v": (2, 3), "joined": ints(0, 5, 12)},
        frame="tokens",
        width=12,
        units=(2, 3),
        note="each-head",
    ),
    Case(op="MatMul", body="z = MatMul(h, v)", weights={"v": (8, 6)}, width=6, units=(6, 8)),
    Case(
        op="MatMul", body="z = MatMul(h, v)", weights={"v": (8, 6)}, width=6, units=(6, 8), frame="tokens", note="3-d"
    ),
    Case(op="MatMul", body="z = MatMul(v, h)", weights={"v": (5, 5)}, frame="tokens", note="constant-left"),
    Case(
        op="MatMul",
        body="z = MatMul(h, v)",
        weights={"v": (3, 8, 8)},
        refused="batch axes",
        units=(),
        note="batched-weight",
        frame="tokens",
    ),
    Case(
        op="MatMul",
        body="t = Transpose<perm=[0,2,1]>(g)\na = MatMul(h, t)\nb = Softmax(a)\nz = MatMul(b, h)",
        units=(),
        refused="contracted with another activation",
        frame="tokens",
        note="one-head",
    ),
    Case(op="Gemm", body="z = Gemm(h, v, b)", weights={"v": (8, 6), "b": (6,)}, width=6, units=(6, 8)),
    Case(
        op="Gemm",
        body="z = Gemm<transB=1, alpha=0.5, beta=2.0>(h, v, b)",
        weights={"v": (6, 8), "b": (1, 6)},
        width=6,
        units=(6, 8),
        note="transposed",
    ),
    Case(op="Gemm", body="z = Gemm(h, v)", weights={"v": (8, 6)}, width=6, units=(6, 8), note="no-bias"),
    Case(op="Gemm", body="z = Gemm(h, v, b)", weights={"v": (8, 6), "b": (1,)}, width=6, units=(6, 8), note="one-bias"),
    Case(
        op="Gemm",
        body="t = Transpose(h)\nz = Gemm<transA=1>(t, v)",
        weights={"v": (8, 8)},
        refused="transA",
        units=(),
        note="transA",
    ),
    Case(
        op="Gemm",
        body="z = Gemm(h, v, x2)",
        weights={"v": (8, 6)},
        inputs="float[N,6] x2",
        width=6,
        units=(8,),
        note="bias-from-input",
    ),
    Case(
        op="Gemm",
        body="t = Transpose(g)\nz = Gemm(h, t, b)\n",
        weights={"b": (1,)},
        width=3,
        refused="constant B",
        units=(),
        note="computed-weight",
    ),
]

CONV = [
    Case(
        op="Conv",
        body="z = Conv<pads=[1,1,1,1]>(h, v, b)",
        weights={"v": (6, 8, 3, 3), "b": (6,)},
        width=6,
        units=(6, 8),
        frame="maps",
    ),
    Case(
        op="Conv",
        body="r = Reshape(h, s)\nc = Conv(r, v)\nz = Unsqueeze(c, a)",
        weights={"s": ints(0, 8, 16), "v": (6, 8, 2), "a": ints(3)},
        width=6,
        units=(6, 8),
        frame="maps",
        note="1-d",
    ),
    Case(
        op="Conv",
        body="z = Conv<group=8, pads=[1,1,1,1]>(h, v, b)",
        weights={"v": (8, 1, 3, 3), "b": (8,)},
        frame="maps",
        note="depthwise",
    ),
    Case(
        op="Conv",
        body="z = Conv<group=8>(h, v, b)",
        weights={"v": (16, 1, 2, 2), "b": (16,)},
        width=16,
        frame="maps",
        note="depthwise-multiplier",
    ),
    Case(
        op="Conv",
        body="z = Conv<group=4>(h, v, b)",
        weights={"v": (12, 2, 2, 2), "b": (12,)},
        width=12,
        units=(4,),
        frame="maps",
        note="grouped",
    ),
    Case(
        op="Conv",
        body="a = Slice(h, i, j)\nz = Conv<pads=[1,1,2,2]>(g, a)",
        weights={"i": ints(0), "j": ints(2)},
        width=2,
        refused="computed at run time",
        units=(),
        frame="maps",
        note="computed-weight",
    ),
    Case(
        op="ConvTranspose",
        body="z = ConvTranspose<strides=[2,2]>(h, v, b)",
        weights={"v": (8, 6, 2, 2), "b": (6,)},
        width=6,
        units=(6, 8),
        frame="maps",
    ),
    Case(
        op="ConvTranspose",
        body="z = ConvTranspose<group=4>(h, v)",
        weights={"v": (8, 2, 2, 2)},
        refused="grouped",
        units=(),
        frame="maps",
        note="grouped",
    ),
    *(
        Case(op=op, body=f"z = {op}<kernel_shape=[2,2], strides=[2,2]>(h)", frame="maps")
        for op in ("MaxPool", "AveragePool", "LpPool")
    ),
    *(Case(op=op, body=f"z = {op}(h)", frame="maps") for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")),
    Case(
        op="MaxPool",
        body="p, q = MaxPool<kernel_shape=[2,2]>(h)\nf = Cast<to=1>(q)\nz = Mul(p, f)",
        units=(),
        refused="indices number the channels",
        frame="maps",
        note="indices",
    ),
    Case(
        op="Resize",
        body='z = Resize<mode="linear">(h, , s)',
        weights={"s": np.float32([1, 1, 2, 2])},
        frame="maps",
        note="scales",
    ),
    Case(
        op="Resize",
        body="i = Shape<end=1>(h)\ns = Concat<axis=0>(i, t)\nz = Resize(h, , , s)",
        weights={"t": ints(8, 7, 9)},
        frame="maps",
        note="sizes",
    ),
    Case(
        op="Resize",
        body="i = Shape<end=1>(h)\nj = Shape<start=2>(skip)\ns = Concat<axis=0>(i, c, j)\nz = Resize(h, , , s)",
        weights={"c": ints(8)},
        inputs="float[N,1,S,T] skip",
        frame="maps",
        note="sizes-of-an-input",
    ),
    Case(
        op="Resize",
        body='z = Resize<mode="linear">(h, , , s)',
        weights={"s": ints(3, 8, 7, 9)},
        frame="maps",
        note="fixed-sizes",
    ),
    Case(op="Resize", body="z = Resize<axes=[2,3]>(h, , , s)", weights={"s": ints(7, 9)}, frame="maps", note="axes"),
    Case(
        op="Resize",
        body="z = Resize(h, , s)",
        weights={"s": np.float32([1, 2, 1, 1])},
        width=16,
        refused="resizes the channel",
        units=(),
        frame="maps",
        note="channels",
    ),
    Case(op="Upsample", body="z = Upsample(h, s)", weights={"s": np.float32([1, 1, 2, 2])}, frame="maps", opset=9),
    Case(op="DepthToSpace", body="z = DepthToSpace<blocksize=2>(h)", width=2, units=(2,), frame="maps", note="DCR"),
    Case(
        op="DepthToSpace",
        body='z = DepthToSpace<blocksize=2, mode="CRD">(h)',
        width=2,
        units=(2,),
        frame="maps",
        note="CRD",
    ),
    Case(op="SpaceToDepth", body="z = SpaceToDepth<blocksize=2>(h)", width=32, frame="maps"),
]

CASES = [*LINEAR, *CONV]
