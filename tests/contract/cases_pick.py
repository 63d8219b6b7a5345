"""Cases of the rules in `ops/pick.py`."""

from __future__ import annotations

import numpy as np

from tests.contract.rule_case import Case
from tests.tiny import ints

RUNTIME = "computed at run time"
RANKED = "ranks the positions"
NUMBER = "by where they stand"
BODY = "handles it"
MANY = (0.25, 0.6, 0.9)

INDEX = np.random.default_rng(0).integers(0, 4, (3, 8, 2, 4))
ELEMENTS = [
    Case(
        op="GatherElements",
        body="z = GatherElements<axis=0>(h, i)",
        weights={"i": INDEX[0, :, :1, 0].T % 2},
        note="rows",
    ),
    Case(
        op="GatherElements",
        ratios=MANY,
        body="z = GatherElements<axis=2>(h, i)",
        weights={"i": INDEX[:2]},
        frame="maps",
        note="constant",
    ),
    Case(
        op="GatherElements",
        ratios=MANY,
        body="z = GatherElements<axis=2>(h, i)",
        weights={"i": INDEX[:2, :6]},
        frame="maps",
        width=6,
        units=(6,),
        note="fewer-channels",
    ),
    Case(
        op="GatherElements",
        ratios=MANY,
        body="i = Mod(ids, four)\nz = GatherElements<axis=-1>(h, i)",
        weights={"four": np.array(4)},
        inputs="int64[N,8,4,3] ids",
        frame="maps",
        note="index-from-input",
    ),
    Case(
        op="GatherElements",
        ratios=MANY,
        body="i = ArgMax<axis=2>(g)\nz = GatherElements<axis=2>(h, i)",
        frame="maps",
        note="index-with-channels",
    ),
    Case(
        op="GatherElements", body="z = GatherElements<axis=1>(h, i)", inputs="int64[N,8] i", units=(), refused=RUNTIME
    ),
    Case(
        op="GatherElements",
        body="r = Reshape(h, flat)\nk = Mod(ids, four)\ni = Reshape(k, flat)\n"
        "p = GatherElements<axis=1>(r, i)\nq = Reshape(p, back)\nz = Relu(q)",
        weights={"four": np.array(4), "flat": ints(-1, 4, 4), "back": ints(-1, 8, 4, 4)},
        inputs="int64[N,8,4,4] ids",
        frame="maps",
        units=(),
        refused="follows the batch",
        note="merged-with-batch",
    ),
    Case(
        op="GatherElements",
        body="i = ArgMax<axis=1>(h)\nz = GatherElements<axis=1>(g, i)",
        frame="maps",
        width=1,
        units=(),
        refused="mixes the whole channel axis",
        by="ArgMax",
        note="channels-by-rank",
    ),
]

RANKS = [
    Case(
        op="TopK",
        ratios=MANY,
        body="v, i = TopK<axis=2>(h, two)\nf = Cast<to=1>(i)\nz = Add(v, f)",
        weights={"two": ints(2)},
        frame="maps",
        note="space",
    ),
    Case(
        op="TopK",
        body="r = Reshape(h, apart)\nv, i = TopK(r, two)\nz = Reshape(v, flat)",
        weights={"apart": ints(0, 2, 4), "two": ints(2), "flat": ints(0, 4)},
        width=4,
        units=(2,),
        note="within-groups",
    ),
    Case(op="TopK", body="z, i = TopK(h, two)", weights={"two": ints(2)}, width=2, units=(), refused=RANKED),
    Case(op="Trilu", body="z = Trilu<upper=0>(h)", frame="maps"),
    Case(op="Trilu", body="z = Trilu(h)", frame="tokens", units=(), refused=NUMBER),
    Case(op="Trilu", domain="com.microsoft", body="z = com.microsoft.Trilu<upper=0>(h)", frame="maps"),
    Case(
        op="ReverseSequence",
        body="z = ReverseSequence<time_axis=1, batch_axis=0>(h, n)",
        inputs="int64[N] n",
        frame="tokens",
        units=(8,),
    ),
    Case(
        op="ReverseSequence",
        body="t = Transpose(h)\nu = ReverseSequence<time_axis=0, batch_axis=1>(t, n)\nz = Transpose(u)",
        inputs="int64[N] n",
        units=(),
        refused=NUMBER,
    ),
    Case(
        op="Compress",
        ratios=MANY,
        body="z = Compress<axis=1>(h, c)",
        weights={"c": np.array([1, 0, 1, 1, 0, 1, 1], bool)},
        width=5,
        units=(5,),
        note="channels",
    ),
    Case(
        op="Compress",
        body="z = Compress<axis=-1>(h, c)",
        inputs="bool[4] c",
        frame="maps",
        note="space",
    ),
    Case(
        op="Compress",
        body="p = Compress<axis=1>(h, c)\nz = ReduceMean(p, a)",
        weights={"a": ints(1)},
        inputs="bool[8] c",
        width=1,
        units=(),
        refused=RUNTIME,
        note="condition-from-input",
    ),
    Case(
        op="Compress",
        body="p = Compress(h, c)\nz = Unsqueeze(p, a)",
        weights={"a": ints(0), "c": np.ones(5, bool)},
        width=5,
        units=(),
        refused="it has no axis",
        note="flat",
    ),
    Case(op="CumProd", body="z = CumProd(h, a)", weights={"a": np.array(2)}, frame="maps", opset=26, note="space"),
    Case(
        op="CumProd",
        body="z = CumProd(h, a)",
        weights={"a": np.array(-1)},
        opset=26,
        units=(),
        refused="mixes the whole channel axis",
    ),
]

WHOLE = {"i": np.zeros((1, 8), np.int64), "u": (1, 8)}
WRITTEN = [
    *(
        Case(
            op=op,
            body=f"z = {op}(h, i, u)",
            weights=WHOLE,
            opset=9 if op == "Scatter" else 20,
            note="constant",
        )
        for op in ("ScatterElements", "Scatter")
    ),
    Case(
        op="ScatterND",
        body="z = ScatterND(h, i, u)",
        weights={"i": ints(0)[:, None], "u": (1, 8)},
        note="constant-rows",
    ),
    Case(
        op="ScatterND",
        body="s = Shape(h)\ne = ConstantOfShape(s)\na = Gather(h, i)\nc = Unsqueeze(i, one)\n"
        'z = ScatterND<reduction="add">(e, c, a)',
        weights={"i": ints(0, 2, 0), "one": ints(1)},
        note="sums-of-rows",
    ),
    Case(
        op="ScatterND",
        body='t = Transpose<perm=[1,0,2]>(h)\nu = Gather(t, i)\nz = ScatterND<reduction="add">(h, at, u)',
        weights={"i": ints(0, 3), "at": np.array([[[0, 1], [0, 2], [1, 3]], [[2, 0], [1, 1], [0, 0]]])},
        frame="tokens",
        note="cells",
    ),
    Case(
        op="ScatterND",
        body="z = ScatterND(h, i, u)",
        weights={"i": np.array([[0, 1], [1, 7]]), "u": (2,)},
        units=(),
        refused="at numbered positions",
        note="channels",
    ),
    Case(
        op="ScatterND",
        body="u = Gather(k, rows)\nz = ScatterND(h, i, u)",
        weights={"rows": ints(0, 1), "i": ints(2, 0)[:, None]},
        inputs="float[N,8] k",
        units=(),
        refused="combined with k, an input of the model",
        note="fixed-updates",
    ),
    Case(
        op="ScatterElements",
        body="s = Shape(h)\ne = ConstantOfShape(s)\nw = Slice(s, one, two)\nn = Concat<axis=0>(three, w)\n"
        'j = Expand(i, n)\na = Gather(h, k)\nz = ScatterElements<axis=0, reduction="add">(e, j, a)',
        weights={"one": ints(1), "two": ints(2), "three": ints(3), "i": ints(0, 2, 0)[:, None], "k": ints(1, 2, 0)},
        note="expanded-index",
    ),
    Case(
        op="ScatterElements",
        body="z = ScatterElements<axis=1>(h, i, g)",
        weights={"i": np.tile(np.arange(8)[::-1], (3, 1))},
        units=(),
        refused="at numbered positions",
        note="along-channels",
    ),
    Case(
        op="ScatterElements",
        body="r = Reshape(h, apart)\nq = ScatterElements<axis=2>(r, i, u)\nz = Reshape(q, flat)",
        weights={"apart": ints(0, 2, 4), "i": np.ones((3, 2, 1), np.int64), "u": (3, 2, 1), "flat": ints(0, 8)},
        units=(2,),
        note="within-groups",
    ),
    Case(
        op="ScatterElements",
        body='z = ScatterElements<axis=1, reduction="max">(h, i, g)',
        weights={"i": np.random.default_rng(0).integers(0, 5, (3, 5, 8))},
        frame="tokens",
        note="along-tokens",
    ),
    Case(
        op="TensorScatter",
        body="z = TensorScatter<axis=1>(h, g, at)",
        weights={"at": np.zeros(3, np.int64)},
        frame="tokens",
        opset=24,
        units=(),
        refused="at numbered positions",
    ),
    Case(
        op="OneHot",
        body="a = Cast<to=7>(h)\nb = OneHot<axis=1>(a, eight, values)\nf = Squeeze(k, last)\nz = Add(h, f)",
        weights={"eight": np.array(8), "values": np.float32([0, 1]), "last": ints(2)},
        inputs="float[N,8,1] k",
        units=(),
        refused=NUMBER,
    ),
    Case(
        op="Unique",
        body="a = Round(h)\nu, i, j = Unique<sorted=1>(a)\ns = Shape(h)\nf = Cast<to=1>(j)\nr = Reshape(f, s)\n"
        "z = Add(h, r)",
        units=(),
        refused=NUMBER,
    ),
    Case(
        op="Multinomial",
        body="p = Softplus(h)\nm = Multinomial<sample_size=8>(p)\nn = Mul(m, none)\nf = Cast<to=1>(n)\nz = Add(g, f)",
        weights={"none": np.array(0, np.int32)},
        units=(),
        refused=NUMBER,
    ),
]

BRANCH = """
    z = If (flag) <
        then_branch = yes () => (float[N,8] t) { t = Relu(h) },
        else_branch = no () => (float[N,8] e) { e = Neg(h) }
    >
"""
LOOP = """
    z = Loop (times, , h) <
        body = step (int64 i, bool go, float[N,8] s) => (bool on, float[N,8] next) {
            on = Identity(go)
            next = Tanh(s)
        }
    >
"""
NESTED = """
    c = Relu(h)
    z = Loop (times, , start) <
        body = step (int64 i, bool go, float[N,8] s) => (bool on, float[N,8] next) {
            on = Identity(go)
            next = If (go) <
                then_branch = yes () => (float[N,8] t) { t = Add(s, c) },
                else_branch = no () => (float[N,8] e) { e = Neg(c) }
            >
        }
    >
"""
SCAN = """
    t = Transpose<perm=[1,0,2]>(h)
    a = Scan <
        num_scan_inputs = 1,
        body = step (float[N,8] s) => (float[N,8] o) { o = Tanh(s) }
    > (t)
    z = Transpose<perm=[1,0,2]>(a)
"""
BODIES = [
    Case(op="If", body=BRANCH, weights={"flag": np.array(True)}, units=(), refused="the body of If reads it"),
    Case(op="Loop", body=LOOP, weights={"times": np.array(2)}, units=(), refused=BODY, note="carried"),
    Case(
        op="Loop",
        body=NESTED,
        weights={"times": np.array(2)},
        inputs="float[N,8] start",
        units=(),
        refused="the body of Loop reads it",
        note="nested",
    ),
    Case(op="Scan", body=SCAN, frame="tokens", units=(), refused=BODY),
]

CASES = [*ELEMENTS, *RANKS, *WRITTEN, *BODIES]
