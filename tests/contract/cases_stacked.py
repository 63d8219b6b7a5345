"""Constants in products that are no matrix on the right: stacks, matrices on the left, vectors, states of zeros."""

from __future__ import annotations

import numpy as np

from tests.contract.rule_case import Case
from tests.tiny import ints

CASES = [
    Case(
        op="MatMul",
        body="p = MatMul(v, h)\nq = Softplus(p)\nz = MatMul(w, q)",
        weights={"v": (4, 5), "w": (3, 4)},
        units=(4, 8),
        frame="tokens",
        note="two-constants-left",
    ),
    Case(
        op="MatMul",
        body="t = Transpose<perm=[0,2,1]>(h)\np = MatMul(v, t)\nz = Transpose<perm=[0,2,1]>(p)",
        weights={"v": (6, 8)},
        width=6,
        units=(6, 8),
        frame="tokens",
        note="constant-left-consumes",
    ),
    Case(
        op="MatMul",
        body="a = Unsqueeze(h, one)\nb = Expand(a, members)\np = MatMul(b, v)\nq = Add(p, b1)\nr = Softplus(q)\n"
        "s = MatMul(r, w)\nz = ReduceMean<keepdims=0>(s, one)",
        weights={"one": ints(1), "members": ints(1, 3, 1, 1), "v": (3, 8, 6), "b1": (3, 1, 6), "w": (3, 6, 4)},
        width=4,
        units=(4, 6, 8),
        frame="tokens",
        note="stack-per-member",
    ),
    Case(
        op="MatMul",
        body="p = MatMul(h, v)\nq = Add(p, b1)\nr = Softplus(q)\ns = MatMul(r, w)\nz = ReduceMean<keepdims=0>(s, zero)",
        weights={"zero": ints(0), "v": (3, 8, 6), "b1": (3, 1, 6), "w": (3, 6, 4)},
        width=4,
        units=(4, 6, 8),
        note="stack-broadcast",
    ),
    Case(
        op="MatMul",
        body="a = Unsqueeze(h, one)\np = MatMul(a, v)\nq = Softplus(p)\nz = ReduceSum<keepdims=0>(q, one)",
        weights={"one": ints(1), "v": (1, 4, 8, 6)},
        width=6,
        units=(6, 8),
        frame="tokens",
        note="stack-broadcast-both-ways",
    ),
    Case(
        op="MatMul",
        body="r = Reshape(h, apart)\nt = Transpose<perm=[0,2,1,3]>(r)\np = MatMul(t, v)\nq = Softplus(p)\n"
        "s = MatMul(q, w)\nz = ReduceSum<keepdims=0>(s, one)",
        weights={"apart": ints(0, 5, 4, 2), "one": ints(1), "v": (4, 2, 3), "w": (4, 3, 5)},
        width=5,
        units=(3, 5),
        frame="tokens",
        refused="mixes the whole channel axis",
        by="ReduceSum",
        note="stack-per-head",
    ),
    Case(
        op="MatMul",
        body="p = MatMul(zeros, v)\nq = Add(h, p)\nr = Tanh(q)\ns = MatMul(r, v)\nt = Add(h, s)\nz = Tanh(t)",
        weights={"zeros": np.zeros((1, 8), np.float32), "v": (8, 8)},
        note="state-of-zeros",
    ),
    Case(
        op="MatMul",
        body="p = MatMul(ones, v)\nq = Add(h, p)\nr = Tanh(q)\ns = MatMul(r, v)\nt = Add(h, s)\nz = Tanh(t)",
        weights={"ones": np.ones((1, 8), np.float32), "v": (8, 8)},
        units=(),
        refused="is also read by MatMul",
        note="state-of-ones",
    ),
    Case(
        op="Gemm",
        body="p = Gemm<transB=1>(zeros, v, b)\nq = Add(h, p)\nr = Tanh(q)\ns = Gemm<transB=1>(r, v, b)\n"
        "t = Add(h, s)\nz = Tanh(t)",
        weights={"zeros": np.zeros((1, 8), np.float32), "v": (8, 8), "b": (8,)},
        note="state-of-zeros",
    ),
    Case(
        op="MatMul",
        body="p = MatMul(h, v)\nz = Unsqueeze(p, one)",
        weights={"v": (8,), "one": ints(1)},
        width=1,
        units=(8,),
        note="vector",
    ),
    Case(
        op="MatMul",
        body="s = ReduceSum<keepdims=0>(h, zero)\np = MatMul(v, s)\nz = Unsqueeze(p, zero)",
        weights={"v": (6, 8), "zero": ints(0)},
        width=6,
        units=(6, 8),
        note="matrix-times-vector",
    ),
    Case(
        op="Gemm",
        body="t = Transpose(h)\np = Gemm(v, t, b)\nz = Transpose(p)",
        weights={"v": (6, 8), "b": (6, 1)},
        width=6,
        units=(6, 8),
        note="constant-first",
    ),
    Case(
        op="Gemm",
        body="p = Gemm<transA=1, transB=1>(v, h)\nz = Transpose(p)",
        weights={"v": (8, 6)},
        width=6,
        units=(6, 8),
        note="both-turned",
    ),
]
