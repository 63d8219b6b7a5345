"""Cases of fused ops that only GPUs have kernels for: a local function of the same name does their work here."""

from __future__ import annotations

from functools import partial

from tests.contract.rule_case import Case
from tests.tiny import ints

DOMAIN = "standin"

FUNCTIONS = """
<domain: "standin", opset_import: ["" : 21]>
GroupNorm <groups, activation, channels_last> (x, s, t) => (y) {
    c = Transpose<perm=[0,3,1,2]>(x)
    n = GroupNormalization<num_groups: int = @groups>(c, s, t)
    y = Transpose<perm=[0,2,3,1]>(n)
}
<domain: "standin", opset_import: ["" : 21]>
SkipGroupNorm <groups, activation> (x, s, t, skip, bias) => (y, sum) {
    a = Add(x, skip)
    sum = Add(a, bias)
    c = Transpose<perm=[0,3,1,2]>(sum)
    n = GroupNormalization<num_groups: int = @groups>(c, s, t)
    y = Transpose<perm=[0,2,3,1]>(n)
}
<domain: "standin", opset_import: ["" : 21]>
NhwcConv (x, w) => (y) {
    c = Transpose<perm=[0,3,1,2]>(x)
    f = Transpose<perm=[0,3,1,2]>(w)
    k = Conv(c, f)
    y = Transpose<perm=[0,2,3,1]>(k)
}
<domain: "standin", opset_import: ["" : 21]>
NhwcFusedConv <activation> (x, w) => (y) {
    c = Transpose<perm=[0,3,1,2]>(x)
    f = Transpose<perm=[0,3,1,2]>(w)
    k = Conv(c, f)
    r = Relu(k)
    y = Transpose<perm=[0,2,3,1]>(r)
}
<domain: "standin", opset_import: ["" : 21]>
BiasAdd (x, bias, skip) => (y) {
    a = Add(x, bias)
    y = Add(a, skip)
}
<domain: "standin", opset_import: ["" : 21]>
BiasSplitGelu (x, bias) => (y) {
    a = Add(x, bias)
    p, q = Split<axis=-1, num_outputs=2>(a)
    g = Gelu(q)
    y = Mul(p, g)
}
<domain: "standin", opset_import: ["" : 21]>
GemmFastGelu (x, w, bias) => (y) {
    a = MatMul(x, w)
    b = Add(a, bias)
    y = Gelu<approximate="tanh">(b)
}
"""

Standin = partial(Case, domain=DOMAIN, functions=FUNCTIONS, frame="maps", opset=21)

LAST = "t = Transpose<perm=[0,2,3,1]>(h)\n"
BACK = "z = Transpose<perm=[0,3,1,2]>(o)"
NORM = {"c": (8,), "d": (8,)}

CASES = [
    Standin(
        op="GroupNorm",
        body=f"{LAST}o = standin.GroupNorm<groups=4, activation=0>(t, c, d)\n{BACK}",
        weights=NORM,
        units=(4,),
    ),
    Standin(
        op="GroupNorm",
        body=f"{LAST}e = standin.GroupNorm<groups=4, activation=0>(t, c, k)\no = Relu(e)\n{BACK}",
        inputs="float[8] k",
        weights=NORM,
        units=(),
        refused="computed at run time",
        note="shift-from-input",
    ),
    Standin(
        op="SkipGroupNorm",
        body=f"{LAST}u = Transpose<perm=[0,2,3,1]>(g)\n"
        f"o, sum = standin.SkipGroupNorm<groups=4, activation=0>(t, c, d, u, b)\nj = Relu(sum)\nk = Add(o, j)\n"
        "z = Transpose<perm=[0,3,1,2]>(k)",
        weights={**NORM, "b": (8,)},
        units=(4,),
    ),
    Standin(
        op="SkipGroupNorm",
        body=f"{LAST}u = Slice(t, one, two, axes)\n"
        f"o, sum = standin.SkipGroupNorm<groups=4, activation=0>(t, c, d, k, b)\n{BACK}",
        inputs="float[4,8] k",
        weights={**NORM, "b": (8,), "one": ints(0), "two": ints(1), "axes": ints(1)},
        units=(),
        refused="its inputs have different shapes",
        note="small-skip",
    ),
    Standin(op="BiasAdd", body="z = standin.BiasAdd(h, b, g)", weights={"b": (8,)}, frame="tokens"),
    Standin(
        op="BiasSplitGelu",
        body="z = standin.BiasSplitGelu(h, b)",
        weights={"b": (8,)},
        frame="tokens",
        width=4,
        units=(4,),
    ),
    Standin(
        op="GemmFastGelu",
        body="z = standin.GemmFastGelu(h, v, b)",
        weights={"v": (8, 6), "b": (6,)},
        frame="tokens",
        width=6,
        units=(6, 8),
    ),
    Standin(
        op="GemmFastGelu",
        body="v = Slice(g, i, j)\nr = Squeeze(v, i)\nt = Transpose(r)\nz = standin.GemmFastGelu(h, t, b)",
        weights={"b": (5,), "i": ints(0), "j": ints(1)},
        frame="tokens",
        width=5,
        units=(),
        refused="its weight is computed at run time",
        note="computed-weight",
    ),
    *(
        Standin(
            op=op,
            body=f"{LAST}o = standin.{op}(t, v)\n{BACK}",
            weights={"v": (6, 1, 1, 8)},
            width=6,
            units=(),
            refused="own blocked layout",
        )
        for op in ("NhwcConv", "NhwcFusedConv")
    ),
]
