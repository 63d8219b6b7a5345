"""Cases of the rule in `ops/einsum.py`."""

from __future__ import annotations

from tests.contract.rule_case import Case
from tests.tiny import ints

APART, JOINED = ints(0, 5, 4, 2), ints(0, 5, 8)
CASES = [
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
        refused="product of two activations",
        note="summed",
    ),
    Case(op="Einsum", body='z = Einsum<equation="...c,...c->...c">(h, g)', frame="tokens", note="ellipsis"),
    Case(
        op="Einsum",
        body='z = Einsum<equation="...c, cd -> ...d">(h, v)',
        weights={"v": (8, 6)},
        frame="tokens",
        width=6,
        units=(6, 8),
        note="matrix",
    ),
    Case(
        op="Einsum",
        body='z = Einsum<equation="dc,bc">(v, h)',
        weights={"v": (6, 8)},
        width=6,
        units=(6, 8),
        note="matrix-first",
    ),
    Case(
        op="Einsum",
        body='p = Einsum<equation="btc,chd->bthd">(h, v)\nq = Relu(p)\nz = Einsum<equation="bthd,hde->bte">(q, w)',
        weights={"v": (8, 4, 3), "w": (4, 3, 5)},
        frame="tokens",
        width=5,
        units=(3, 4, 5, 8),
        note="two-axes",
    ),
    Case(
        op="Einsum",
        body="r = Reshape(h, apart)\n"
        'p = Einsum<equation="bthd,hde->bthe">(r, v)\nq = Relu(p)\nz = Einsum<equation="bthe,hef->btf">(q, w)',
        weights={"apart": APART, "v": (4, 2, 3), "w": (4, 3, 5)},
        frame="tokens",
        width=5,
        units=(3, 4, 5),
        note="matrix-per-head",
    ),
    Case(
        op="Einsum",
        body='a = Einsum<equation="btc,cd->bd">(h, v)\nz = Unsqueeze(a, one)',
        weights={"v": (8, 6), "one": ints(1)},
        frame="tokens",
        width=6,
        units=(6, 8),
        note="summed-tokens",
    ),
    Case(
        op="Einsum",
        body='a = Einsum<equation="btc,tu->bu">(h, v)\nb = Unsqueeze(a, two)\nz = Mul(b, s)',
        weights={"v": (5, 5), "two": ints(2), "s": (8,)},
        frame="tokens",
        units=(),
        refused="product of two activations",
        note="summed-channels",
    ),
    Case(
        op="Einsum",
        body='z = Einsum<equation="bc,dc,d->bd">(h, v, s)',
        weights={"v": (6, 8), "s": (6,)},
        width=6,
        units=(),
        refused="beside several operands",
        note="three",
    ),
    Case(
        op="Einsum",
        body='d = Einsum<equation="bcii->bci">(h)\nz = Unsqueeze(d, last)',
        weights={"last": ints(3)},
        frame="maps",
        units=(),
        refused="repeated letter",
        note="diagonal",
    ),
]
