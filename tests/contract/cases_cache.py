"""Cases of fused attention with caches, shared key-value heads and packed operands."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from tests.contract.rule_case import Case
from tests.tiny import ints

CACHE = "--kv-io"
Microsoft = partial(Case, domain="com.microsoft", frame="tokens")
Standard = partial(Case, opset=23, frame="tokens")
Grouped = partial(Microsoft, op="GroupQueryAttention", width=72)

THIRD = "v = MatMul(x, wv)\n"
PAIR = "k = MatMul(x, wk)\nv = MatMul(x, wv)\n"
LENGTHS = "n = Shape<start=0, end=1>(x)\nlast = Expand(final, n)\n"  # index of the last valid token, per sample
TABLES = {t: np.random.default_rng(4).normal(size=(12, 1)).astype(np.float32) for t in ("cos", "sin")}
WIDE = {t: np.random.default_rng(4).normal(size=(16, 8)).astype(np.float32) for t in ("cos", "sin")}


def pasts(heads: int, size: int = 2) -> str:
    """Inputs that hold four tokens."""
    return f"float[N,{heads},4,{size}] pk, float[N,{heads},4,{size}] pv"


def lengths(total: int) -> dict[str, np.ndarray]:
    """Numbers that GroupQueryAttention wants to know."""
    return {"final": np.array([total - 1], np.int32), "total": np.array(total, np.int32)}


def both(case: Case, units: tuple[int, ...], *, refused: str = CACHE) -> list[Case]:
    """A case whose cache is on the interface: with leave to narrow it, and without."""
    return [
        replace(case, interface=True, note=f"{case.note}-kv-io"),
        replace(case, units=units, refused=refused, note=case.note),
    ]


PRESENT = ", float[] nk, float[] nv"

STANDARD = [
    *both(
        Standard(
            op="Attention",
            body=f"{THIRD}z, nk, nv = Attention<q_num_heads=4, kv_num_heads=4>(h, g, v, , pk, pv)",
            weights={"wv": (6, 8)},
            inputs=pasts(4),
            outputs=PRESENT,
            units=(4,),
            note="past",
        ),
        (),
    ),
    *both(
        Standard(
            op="Attention",
            body=f"{PAIR}z, nk, nv, s = Attention<q_num_heads=4, kv_num_heads=2, qk_matmul_output_mode=1>"
            "(h, k, v, , pk, pv)\nscores = ReduceMean(s, inner)",
            weights={"wk": (6, 4), "wv": (6, 4), "inner": ints(2, 3)},
            inputs=pasts(2),
            outputs=PRESENT,
            units=(2,),
            note="past-of-groups",
        ),
        (2,),
        refused="",
    ),
    Standard(
        op="Attention",
        body=f"{PAIR}z = Attention<q_num_heads=4, kv_num_heads=1>(h, k, v)",
        weights={"wk": (6, 2), "wv": (6, 2)},
        units=(4,),
        note="one-shared-head",
    ),
    Standard(
        op="Attention",
        body="hr = Reshape(h, apart)\nhh = Transpose<perm=[0,2,1,3]>(hr)\n"
        + "".join(f"{n} = MatMul(x, w{n})\n{n}h = Unsqueeze({n}, one)\n" for n in "kv")
        + "o = Attention(hh, kh, vh)\nt = Transpose<perm=[0,2,1,3]>(o)\nz = Reshape(t, joined)",
        weights={"wk": (6, 2), "wv": (6, 2), "apart": ints(0, 0, 4, 2), "one": ints(1), "joined": ints(0, 0, -1)},
        units=(4,),
        note="4-d-one-shared-head",
    ),
    Standard(
        op="Attention",
        body=f"{PAIR}z, nk, nv = Attention<q_num_heads=4, kv_num_heads=1>(h, k, v, , pk, pv)",
        weights={"wk": (6, 2), "wv": (6, 2)},
        inputs=pasts(1),
        outputs=PRESENT,
        units=(4,),
        note="past-of-one-shared-head",
    ),
    Standard(
        op="Attention",
        body="z = Attention<q_num_heads=4, kv_num_heads=2>(h, m, m)",
        inputs="float[N,5,4] m",
        units=(2,),
        note="groups-from-input",
    ),
    *both(
        Standard(
            op="Attention",
            body="hr = Reshape(h, apart)\nhh = Transpose<perm=[0,2,1,3]>(hr)\no = Attention(hh, pk, pv)\n"
            "t = Transpose<perm=[0,2,1,3]>(o)\nz = Reshape(t, joined)",
            weights={"apart": ints(0, 0, 4, 2), "joined": ints(0, 0, -1)},
            inputs=pasts(4),
            units=(4,),
            note="past-is-all",
        ),
        (),
    ),
    Standard(
        op="Attention",
        body=f"{THIRD}z, , , output_s = Attention<q_num_heads=4, kv_num_heads=4>(h, g, v)",
        weights={"wv": (6, 8)},
        outputs=", float[] output_s",
        units=(),
        refused="output of the model",
        by="output",
        interface=True,
        note="scores-are-an-output",
    ),
    Case(
        op="Attention",
        opset=24,
        frame="tokens",
        body=f"{THIRD}z, nk, nv = Attention<q_num_heads=4, kv_num_heads=4, is_causal=1>(h, g, v, , pk, pv)",
        weights={"wv": (6, 8)},
        inputs=pasts(4),
        outputs=PRESENT,
        units=(4,),
        interface=True,
        note="24",
    ),
]

BESIDE = "\nz = Concat<axis=-1>(a, h)"  # rotated heads must be of size 16, so h is not among them
NEXT = "token = ReduceMax(x, one)\nnewest = ReduceMax(h, one)\n"  # with a past, batches take one token at a time
THREE = "q = MatMul(x, wq)\nk = MatMul(x, wk)\nv = MatMul(x, wv)\n"


def projected(groups: int) -> dict[str, tuple[int, ...]]:
    """Weights of four query heads and some key-value heads."""
    return {"wq": (6, 64), "wk": (6, 16 * groups), "wv": (6, 16 * groups)}


def next_token(body: str) -> str:
    """The same on one token."""
    return NEXT + body.replace("MatMul(x,", "MatMul(token,").replace("(a, h)", "(a, newest)")


def grouped(groups: int, operands: str, attributes: str = "") -> str:
    """The node, and what it wants to know about lengths."""
    node = f"a, nk, nv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads={groups}{attributes}>"
    return f"{LENGTHS}{node}({operands}){BESIDE}"


GROUPED = [
    *both(
        Grouped(
            body=next_token(THREE + grouped(2, "q, k, v, pk, pv, last, total, cos, sin", ", do_rotary=1")),
            weights={**projected(2), **lengths(5), **WIDE, "one": ints(1)},
            inputs=pasts(2, 16),
            outputs=PRESENT,
            units=(2, 8),
            note="past",
        ),
        (2, 8),
        refused="",
    ),
    *both(
        Grouped(
            body=THREE + grouped(4, "q, k, v, , , last, total"),
            weights={**projected(4), **lengths(5)},
            outputs=PRESENT,
            units=(4, 8),
            note="no-groups",
        ),
        (8,),
        refused="",
    ),
    Grouped(
        body="p = MatMul(x, wp)\n" + grouped(2, "p, , , , , last, total"),
        weights={"wp": (6, 128), **lengths(5)},
        units=(2, 8),
        note="packed",
    ),
    Grouped(
        body=next_token("p = MatMul(x, wp)\n" + grouped(1, "p, , , pk, pv, last, total, cos, sin", ", do_rotary=1")),
        weights={"wp": (6, 96), **lengths(5), **WIDE, "one": ints(1)},
        inputs=pasts(1, 16),
        outputs=PRESENT,
        units=(4, 8),
        note="packed-one-shared-head",
    ),
    Grouped(
        body=THREE + grouped(1, "q, k, v, , , last, total"),
        weights={**projected(1), **lengths(5)},
        units=(4, 8),
        note="one-shared-head",
    ),
    Grouped(
        body=THREE + grouped(2, "q, k, v, , , last, total, , , , bias, sink"),
        weights={**projected(2), "bias": (1, 4, 5, 5), "sink": (4,), **lengths(5)},
        units=(2, 8),
        note="bias-and-sink",
    ),
    Grouped(
        body="m = MatMul(x, wm)\n" + grouped(2, "q, k, v, , , last, total"),
        inputs="float[N,5,64] q, float[N,5,32] k, float[N,5,32] v",
        weights={"wm": (6, 3), **lengths(5)},
        units=(8,),
        note="fed-from-outside",
    ),
]
MULTI_HEAD = [
    *both(
        Microsoft(
            op="MultiHeadAttention",
            body=f"{THIRD}z, nk, nv = com.microsoft.MultiHeadAttention<num_heads=4>(h, g, v, b, , , pk, pv)",
            weights={"wv": (6, 8), "b": (24,)},
            inputs=pasts(4),
            outputs=PRESENT,
            units=(4,),
            note="past",
        ),
        (),
    ),
    *both(
        Microsoft(
            op="MultiHeadAttention",
            body="z = com.microsoft.MultiHeadAttention<num_heads=4>(h, pk, pv)",
            inputs=pasts(4),
            units=(4,),
            note="past-is-all",
        ),
        (),
    ),
    Microsoft(
        op="DecoderMaskedMultiHeadAttention",
        body=f"{THIRD}"
        + "".join(f"{n}1 = ReduceMax({n}, one)\n" for n in "hgv")
        + "z = com.microsoft.DecoderMaskedMultiHeadAttention<num_heads=4>(h1, g1, v1)",
        weights={"wv": (6, 8), "one": ints(1)},
        units=(),
        refused="shared by the beams",
    ),
    *both(
        Microsoft(
            op="Attention",
            body="a, new = com.microsoft.Attention<num_heads=4>(x, w, b, , past)" + BESIDE,
            weights={"w": (6, 24), "b": (24,)},
            inputs="float[2,N,4,4,2] past",
            outputs=", float[] new",
            width=16,
            units=(4, 8),
            note="past",
        ),
        (8,),
        refused="",
    ),
    Microsoft(
        op="RotaryEmbedding",
        body="z = com.microsoft.RotaryEmbedding(h, ids, cos, sin)",
        weights=TABLES,
        inputs="int64[N,5] ids",
        units=(4,),
        note="size-from-tables",
    ),
    Microsoft(
        op="RotaryEmbedding",
        body="hr = Reshape(h, apart)\nhh = Transpose<perm=[0,2,1,3]>(hr)\n"
        "o = com.microsoft.RotaryEmbedding<num_heads=4, rotary_embedding_dim=2>(hh, ids, cos, sin)\n"
        "t = Transpose<perm=[0,2,1,3]>(o)\nz = Reshape(t, joined)",
        weights={**TABLES, "apart": ints(0, 0, 4, 2), "joined": ints(0, 0, -1)},
        inputs="int64[N,5] ids",
        units=(4,),
        note="4-d",
    ),
]

CASES = [*STANDARD, *GROUPED, *MULTI_HEAD]
