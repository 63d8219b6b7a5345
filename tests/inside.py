"""Networks with channels inside heads, these in another basis, and their oracle: heads that are projected."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
from scipy.linalg import block_diag

from onnxgrail.calibration.observe import observe
from onnxgrail.core import Array, Floats
from onnxgrail.graph.attributes import integer
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.products import is_product
from onnxgrail.graph.rotate.basis import Rotatable, rotatable, rotate
from onnxgrail.graph.trace.survey import Survey
from onnxgrail.graph.trace.tracer import trace
from tests.contract.attention import (
    HEADS,
    MERGE,
    PROJECTED,
    PROJECTIONS,
    SCORES,
    SHAPES,
    SIZE,
    SOFTMAX,
    SPLIT,
    TOKENS,
    WIDTH,
    attention,
)
from tests.oracle import survey_of
from tests.tiny import feed, ints, lines, scalar, tiny
from tests.turned import with_fused_products

KINDS = ("qk", "vo")
PACKED = """
    p0 = MatMul(x, wp)
    p1 = Add(p0, bp)
    p2 = Reshape(p1, apart)
    p3 = Transpose<perm=[2,0,3,1,4]>(p2)
    q2, k2, v2 = Split<axis=0, num_outputs=3>(p3)
    q3 = Squeeze(q2, first)
    k3 = Squeeze(k2, first)
    v3 = Squeeze(v2, first)
"""
SPLIT_UP = """
    p0 = MatMul(x, wp)
    p1 = Add(p0, bp)
    q1, k1, v1 = Split<axis=2, num_outputs=3>(p1)
""" + "".join(lines("$p2 = Reshape($p1, into)\n$p3 = Transpose<perm=[0,2,1,3]>($p2)\n", p=p) for p in "qkv")
GROUPED = """
    q0 = MatMul(x, wq)
    q1 = Reshape(q0, into)
    q3 = Transpose<perm=[0,2,1,3]>(q1)
""" + "".join(
    lines(
        """
        $p0 = MatMul(x, w$p)
        $p1 = Reshape($p0, groups)
        $p6 = Transpose<perm=[0,2,1,3]>($p1)
        $p7 = Unsqueeze($p6, second)
        $p8 = Expand($p7, twice)
        $p3 = Reshape($p8, heads)
        """,
        p=p,
    )
    for p in "kv"
)
SHIFTED_SCALE = """
    q4 = Mul(q3, scale)
    q5 = Add(q4, zero)
    k4 = Transpose<perm=[0,1,3,2]>(k3)
    a1 = MatMul(q5, k4)
"""
MEASURED_SCALE = """
    n0 = Shape<start=3, end=4>(q3)
    n1 = Cast<to=1>(n0)
    n2 = Sqrt(n1)
    q5 = Div(q3, n2)
    k4 = Transpose<perm=[0,1,3,2]>(k3)
    a1 = MatMul(q5, k4)
"""


def grouped(groups: int = HEADS // 2, copies: int = 0) -> ir.Model:
    """Query heads share keys and values, of which there are copies; a product repeats those of one head."""
    copies = copies or HEADS // groups
    weights = {
        "wq": (WIDTH, WIDTH),
        "wk": (WIDTH, SIZE * groups),
        "wv": (WIDTH, SIZE * groups),
        "groups": ints(-1, TOKENS, groups, SIZE),
        "second": ints(2),
        "twice": ints(1, groups, copies, TOKENS, SIZE),
        "heads": ints(-1, groups * copies, TOKENS, SIZE),
    }
    return attention(project=GROUPED, projected=weights)


NETS = {
    **{name: attention(shapes=name) for name in SHAPES},
    "masked": attention(mask="a2 = Add(a1, mask)", weights={"mask": (HEADS, TOKENS, TOKENS)}),
    "packed": attention(
        project=PACKED,
        projected={
            "wp": (WIDTH, 3 * WIDTH),
            "bp": (3 * WIDTH,),
            "apart": ints(-1, TOKENS, 3, 2, 4),  # channels of a head outnumber queries, keys and values
            "first": ints(0),
        },
    ),
    "split": attention(
        project=SPLIT_UP,
        projected={"wp": (WIDTH, 3 * WIDTH), "bp": (3 * WIDTH,), "into": ints(-1, TOKENS, HEADS, SIZE)},
    ),
    "shared keys": grouped(),
    "keys that all heads share": grouped(1),
    "keys that a product repeats": grouped(1, 1),
    "scale from the shape": attention(scores=MEASURED_SCALE),
    "scale that adds zero": attention(scores=SHIFTED_SCALE, weights={"zero": scalar(0)}),
}


PRODUCT = "com.microsoft.FusedMatMul"
TURNED_KEYS = f"a1 = {PRODUCT}<alpha=0.7, transB=1>(q3, k3)"
TURNED_ALL = f"""
    q4 = Transpose<perm=[0,1,3,2]>(q3)
    a1 = {PRODUCT}<alpha=0.7, transA=1, transB=1>(q4, k3)
"""
TURNED_VALUES = f"""
    a3 = Softmax<axis=-1>(a2)
    v4 = Transpose<perm=[0,1,3,2]>(v3)
    o0 = {PRODUCT}<transB=1>(a3, v4)
"""
NETS |= {
    "fused products": with_fused_products(attention(scores=TURNED_KEYS, imports={"com.microsoft": 1})),
    "turned operands": attention(scores=TURNED_ALL, softmax=TURNED_VALUES, imports={"com.microsoft": 1}),
}


LETTERS = 'a1 = Einsum<equation="bhqd,bhkd->bhqk">(q3, k3)'
LETTERED_VALUES = """
    a3 = Softmax<axis=-1>(a2)
    o0 = Einsum<equation="bhqk,bhkd->bhqd">(a3, v3)
"""
GATED = """
    a3 = Softmax<axis=-1>(a2)
    g0 = MatMul(x, wg)
    g1 = Sigmoid(g0)
    g2 = Transpose<perm=[0,2,1]>(g1)
    g3 = Unsqueeze(g2, three)
    o3 = MatMul(a3, v3)
    o0 = Mul(o3, g3)
"""
PLACED = """
    q4 = Mul(q3, sizes)
    q5 = Neg(q4)
    k4 = Transpose<perm=[0,1,3,2]>(k3)
    a1 = MatMul(q5, k4)
"""
SHIFTED = """
    q4 = Add(q3, of_queries)
    k4 = Add(of_keys, k3)
    k5 = Transpose<perm=[0,1,3,2]>(k4)
    a1 = MatMul(q4, k5)
"""
SHIFTED_VALUES = """
    a3 = Softmax<axis=-1>(a2)
    v4 = Sub(v3, of_values)
    o0 = MatMul(a3, v4)
"""
SHIFTS = {"of_queries": (HEADS, 1, SIZE), "of_keys": (1, HEADS, TOKENS, SIZE), "of_values": (1, HEADS, 1, SIZE)}
PADDED = {
    "scores": "k5 = Pad(k3, more)\nk4 = Transpose<perm=[0,1,3,2]>(k5)\na1 = MatMul(q3, k4)",
    "softmax": 'a3 = Softmax<axis=-1>(a2)\nv4 = Pad<mode="edge">(v3, more)\no0 = MatMul(a3, v4)',
}
NETS |= {
    "products with letters": attention(scores=LETTERS, softmax=LETTERED_VALUES),
    "a gate for every head": attention(softmax=GATED, weights={"wg": (WIDTH, HEADS), "three": ints(3)}),
    "queries scaled by position": attention(scores=PLACED, weights={"sizes": (TOKENS, 1)}),
    "biases with an axis of heads": attention(scores=SHIFTED, softmax=SHIFTED_VALUES, weights=SHIFTS),
    "more keys than tokens": attention(**PADDED, weights={"more": ints(0, 0, 1, 0, 0, 0, 1, 0)}),
}


def shared_layers() -> ir.Model:
    """Two layers with the same weights, as in ALBERT."""
    first = PROJECTIONS + SPLIT + SCORES + "a2 = Identity(a1)" + SOFTMAX + MERGE
    second = re.sub(r"\b([qkvao][0-9])\b", r"\1b", first).replace("(x,", "(m,")
    weights = {**PROJECTED, "wo": (WIDTH, WIDTH), "out": (WIDTH, 5), "scale": scalar(0.7), **SHAPES["vision"][1]}
    body = f"{first}\nm = MatMul(o2, wo)\n{second}\nn = MatMul(o2b, wo)\ny = MatMul(n, out)"
    return tiny(f"float[N,{TOKENS},{WIDTH}] x => float[] y", body, weights)


def relative() -> ir.Model:
    """Queries are multiplied by keys and by positions, keys by positions, as in DeBERTa."""
    positions = "".join(
        lines("p$p = MatMul(r, p_w$p)\nr$p = Reshape(p$p, into)\nt$p = Transpose<perm=[0,2,3,1]>(r$p)\n", p=p)
        for p in "qk"
    )
    scores = f"""
        {positions}
        k4 = Transpose<perm=[0,1,3,2]>(k3)
        c0 = MatMul(q3, k4)
        c1 = MatMul(q3, tk)
        c2 = MatMul(k3, tq)
        c3 = Transpose<perm=[0,1,3,2]>(c2)
        a0 = Sum(c0, c1, c3)
        a1 = Mul(a0, scale)
    """
    return attention(
        inputs=f"float[N,{TOKENS},{WIDTH}] x, float[N,{TOKENS},{WIDTH}] r",
        scores=scores,
        weights={"p_wq": (WIDTH, WIDTH), "p_wk": (WIDTH, WIDTH)},
    )


NETS["shared layers"] = shared_layers()


def fused(op: str, *, split: str = "", merge: str = "", groups: int = HEADS, bias: bool = False) -> ir.Model:
    """One layer with a fused kernel, for which heads may be split first and merged afterwards."""
    body = "".join(lines("$p = MatMul(x, w$p)\n", p=p) for p in "qkv") + split
    given = ", ".join([f"{p}{'3' if split else ''}" for p in "qkv"] + (["packed"] if bias else []))
    body += f"o = {op}({given})\n{merge}y = MatMul({'o2' if merge else 'o'}, wo)"
    weights: dict[str, tuple[int, ...] | Array] = {"wq": (WIDTH, WIDTH), "wo": (WIDTH, 5)}
    weights |= dict.fromkeys(("wk", "wv"), (WIDTH, groups * SIZE)) | ({"packed": (3 * WIDTH,)} if bias else {})
    shapes = {"into": ints(-1, TOKENS, HEADS, SIZE), "back": ints(-1, TOKENS, WIDTH)} if split else {}
    signature, imports = f"float[N,{TOKENS},{WIDTH}] x => float[N,{TOKENS},5] y", {"com.microsoft": 1}
    return tiny(signature, body, weights | shapes, opset=23, imports=imports)


SPLIT_HEADS = "".join(lines("$p2 = Reshape($p, into)\n$p3 = Transpose<perm=[0,2,1,3]>($p2)\n", p=p) for p in "qkv")
MERGED = "o1 = Transpose<perm=[0,2,1,3]>(o)\no2 = Reshape(o1, back)\n"
OWN, STANDARD = f"com.microsoft.MultiHeadAttention<num_heads={HEADS}>", f"Attention<q_num_heads={HEADS}, kv_num_heads="
KERNELS = {
    "MultiHeadAttention": fused(OWN),
    "MultiHeadAttention with biases": fused(OWN, bias=True),
    "Attention": fused(f"{STANDARD}{HEADS}>"),
    "Attention with shared keys": fused(f"{STANDARD}2>", groups=2),
    "Attention of four axes": fused("Attention", split=SPLIT_HEADS, merge=MERGED),
    "Attention with a scale": fused("Attention<scale=0.3, softcap=2.0>", split=SPLIT_HEADS, merge=MERGED),
}
NETS |= KERNELS


def found_in(model: ir.Model, *, interface: bool = False) -> Rotatable:
    """The bases inside heads."""
    return rotatable(model, survey_of(model, feed(model)).facts, KINDS, interface=interface)


def bases_of(found: Rotatable) -> dict[str, Floats]:
    """Random bases, and random orders of what is picked."""
    rng = np.random.default_rng(4)
    return {
        name: rng.normal(size=one.same.shape) + 2 * one.same if one.units is None else rng.permutation(one.same)
        for name, one in found.heads.items()
    }


def turned(model: ir.Model) -> tuple[ir.Model, Survey, dict[str, Floats]]:
    """The model in other bases, its trace, and the bases."""
    found = found_in(model)
    bases = bases_of(found)
    other = rotate(found, bases)
    return other, trace(other, observe(other, feed(other))), bases


def projected(model: ir.Model, bases: dict[str, Floats], kept: int, *, interface: bool = False) -> ir.Model:
    """The original, with queries and values projected in every head."""
    other, facts = model.clone(), survey_of(model, feed(model)).facts
    heads = found_in(model, interface=interface).heads.values()
    bases = {f"{node.outputs[0].name}/{one.kind}": bases[one.name] for one in heads for node in one.products}
    for node in list(other.graph):
        for kind, operand in zip(KINDS, (0, 1 if len(node.inputs) == 2 else 2), strict=True):
            basis = bases.get(f"{node.outputs[0].name}/{kind}")
            if basis is None:
                continue
            here, shape = np.arange(basis.shape[-1]) < kept, facts.shapes[node.inputs[operand].name]
            projection = (basis * here @ np.linalg.inv(basis)).astype(np.float32)
            if len(shape) == 4:
                numbers = np.repeat(projection, shape[1] // len(basis), axis=0)
            else:
                width = shape[2] // basis.shape[-1]
                numbers = block_diag(*np.repeat(projection, width // len(basis), axis=0))
            first = is_product(node) and bool(integer(node, "transB" if operand else "transA"))
            matrix = constant(other.graph, np.swapaxes(numbers, -1, -2) if first else numbers, f"{kind}/projection")
            operands = [matrix, node.inputs[operand]] if first else [node.inputs[operand], matrix]
            product = ir.Node("", "MatMul", operands, num_outputs=1)
            product.outputs[0].name = f"{node.outputs[0].name}/{kind}/projected"
            other.graph.insert_before(node, product)
            node.replace_input_with(operand, product.outputs[0])
            if operand == 2 and len(node.inputs) > 5:  # so are values of the past
                apart = constant(other.graph, projection, "past/projection")
                past = ir.Node("", "MatMul", [node.inputs[5], apart], num_outputs=1)
                past.outputs[0].name = f"{node.outputs[0].name}/past/projected"
                other.graph.insert_before(node, past)
                node.replace_input_with(5, past.outputs[0])
            elif len(node.inputs) > 3 and node.domain:  # the kernel adds biases after the projection
                biases = node.inputs[3].const_value.numpy().copy()
                mine = slice(-len(numbers), None) if operand else slice(len(numbers))
                biases[mine] = biases[mine] @ numbers
                node.replace_input_with(3, constant(other.graph, biases, "biases"))
    return other
