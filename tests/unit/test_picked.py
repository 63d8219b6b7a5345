"""Queries and keys that are rotated by position: pairs of channels go, and the cosines and sines follow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.algebra.rotation import order_of_pairs
from onnxgrail.calibration.agreement import trial_of
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.proof import prove
from onnxgrail.core import Floats, Ints, Stats
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.rotate.basis import rotatable, rotate
from onnxgrail.graph.rotate.heads import Inside
from onnxgrail.graph.rotate.inside import BENDS
from onnxgrail.graph.rotate.restore import restore
from onnxgrail.graph.trace.survey import Ledger, Survey
from onnxgrail.graph.trace.tracer import trace
from tests.inside import bases_of
from tests.oracle import check_same, narrowed_equals_masked, passes_checker, run, survey_of
from tests.tiny import Weights, feed, ints, lines, scalar, tiny

TOKENS, HEADS, GROUPS, SIZE, WIDTH = 5, 4, 2, 8, 12
ANGLES = np.outer(np.arange(TOKENS), 3.0 ** -np.arange(SIZE // 2)).astype(np.float32)
WHOLE = np.concatenate([ANGLES, ANGLES], axis=1)
HALVES = """
    $pa = Slice($p3, zero, half, three)
    $pb = Slice($p3, half, end, three)
    $pc = Neg($pb)
    $pd = Concat<axis=-1>($pc, $pa)
"""
TURNED = f"""{HALVES}
    $pe = Mul($p3, cosine)
    $pf = Mul($pd, sine)
    $p4 = Add($pe, $pf)
"""
CROSSED = """
    $pc = Mul($pa, cosine)
    $pd = Mul($pb, sine)
    $pe = Sub($pc, $pd)
    $pf = Mul($pa, sine)
    $pg = Mul($pb, cosine)
    $ph = Add($pf, $pg)
"""
COMPUTED = """
    t0 = Shape<start=1, end=2>(x)
    t1 = Squeeze(t0)
    t2 = Range(none, t1, one)
    t3 = Cast<to=1>(t2)
    t4 = Unsqueeze(t3, first)
    t5 = Mul(t4, frequencies)
    t6 = Concat<axis=-1>(t5, t5)
    cosine = Cos(t6)
    sine = Sin(t6)
"""
FIXED: Weights = {"cosine": np.cos(WHOLE), "sine": np.sin(WHOLE)}
HALF: Weights = {"cosine": np.cos(ANGLES), "sine": np.sin(ANGLES)}
BOUNDS: Weights = {"zero": ints(0), "half": ints(SIZE // 2), "end": ints(2**62), "three": ints(3)}
LOOKED_UP = "cosine = Gather(cosines, places)\nsine = Gather(sines, places)\n"

# how queries and keys are rotated: nodes before, nodes per projection, weights, units, opset
WAYS: dict[str, tuple[str, str, Weights, int, int]] = {
    "halves": (COMPUTED, TURNED, {**BOUNDS, "none": np.array(0), "one": np.array(1), "first": ints(1),
                                  "frequencies": (3.0 ** -np.arange(SIZE // 2)).astype(np.float32)}, 4, 20),
    "constant tables": ("", TURNED, {**BOUNDS, **FIXED}, 4, 20),
    "tables of all positions": (
        LOOKED_UP, TURNED,
        {**BOUNDS, "cosines": np.cos(WHOLE), "sines": np.sin(WHOLE), "places": np.arange(TOKENS)}, 4, 20,
    ),
    "two halves": (
        "", f"$pa, $pb = Split<axis=3, num_outputs=2>($p3)\n{CROSSED}$p4 = Concat<axis=3>($pe, $ph)\n", HALF, 4, 20,
    ),
    "interleaved": (
        "",
        f"""
        $pa = Slice($p3, zero, end, three, two)
        $pb = Slice($p3, one, end, three, two)
        {CROSSED}
        $pi = Unsqueeze($pe, four)
        $pj = Unsqueeze($ph, four)
        $pk = Concat<axis=4>($pi, $pj)
        $p4 = Reshape($pk, flat$p)
        """,
        {**HALF, **BOUNDS, "one": ints(1), "two": ints(2), "four": ints(4),
         "flatq": ints(0, HEADS, TOKENS, SIZE), "flatk": ints(0, GROUPS, TOKENS, SIZE)}, 4, 20,
    ),
    "complex numbers": (
        "",
        f"""
        $pi = Reshape($p3, pairs$p)
        $pa = Gather<axis=4>($pi, none)
        $pb = Gather<axis=4>($pi, one)
        {CROSSED}
        $pj = Unsqueeze($pe, four)
        $pk = Unsqueeze($ph, four)
        $pl = Concat<axis=4>($pj, $pk)
        $p4 = Reshape($pl, flat$p)
        """,
        {**HALF, "none": np.array(0), "one": np.array(1), "four": ints(4),
         "pairsq": ints(0, HEADS, TOKENS, SIZE // 2, 2), "pairsk": ints(0, GROUPS, TOKENS, SIZE // 2, 2),
         "flatq": ints(0, HEADS, TOKENS, SIZE), "flatk": ints(0, GROUPS, TOKENS, SIZE)}, 4, 20,
    ),
    "a part": (
        "",
        """
        $pr, $ps = Split<axis=3>($p3, parts)
        $pa, $pb = Split<axis=3, num_outputs=2>($pr)
        $pc = Neg($pb)
        $pd = Concat<axis=-1>($pc, $pa)
        $pe = Mul($pr, cosine)
        $pf = Mul($pd, sine)
        $pg = Add($pe, $pf)
        $p4 = Concat<axis=3>($pg, $ps)
        """,
        {"parts": ints(4, 4), "cosine": np.cos(WHOLE[:, [0, 1, 0, 1]]), "sine": np.sin(WHOLE[:, [0, 1, 0, 1]])}, 6, 20,
    ),
    "one operator": (
        "", "$p4 = RotaryEmbedding($p3, cosine, sine, places)\n",
        {**HALF, "places": np.tile(np.arange(TOKENS), (3, 1))}, 4, 23,
    ),
    "a part in one operator": (
        "", "$p4 = RotaryEmbedding<rotary_embedding_dim=4, interleaved=1>($p3, cosine, sine, places)\n",
        {"cosine": np.cos(ANGLES[:, :2]), "sine": np.sin(ANGLES[:, :2]),
         "places": np.tile(np.arange(TOKENS), (3, 1))}, 6, 23,
    ),
    "an operator of ONNX Runtime": (
        "", "$p4 = com.microsoft.RotaryEmbedding($p3, places, cosine, sine)\n",
        {**HALF, "places": np.tile(np.arange(TOKENS), (3, 1))}, 4, 20,
    ),
    "scaled by position": ("", "$p4 = Mul($p3, cosine)\n", {"cosine": np.cos(WHOLE)}, 8, 20),
}  # fmt: skip
KERNEL = "o0 = Attention(q4, k4, v4)\n"
FORMS = {**WAYS, "none": ("", "$p4 = Identity($p3)\n", {}, SIZE, 20)}


def rotary(
    way: str,
    *,
    keys: str = "k5 = Unsqueeze(k4, second)\n",
    packed: bool = False,
    kernel: str = "",
    norms: Sequence[str] = ("", ""),
    given: Weights | None = None,
    groups: int = GROUPS,
) -> ir.Model:
    """An attention layer whose query heads share keys and values, with rotary embeddings.

    If `packed`, one weight makes queries, keys and values, which are slices of what it computes. `norms` make $pn of
    queries and keys $p2 before their heads are moved, with the weights `given`. A fused `kernel` makes o0.
    """
    before, each, weights, _, opset = FORMS[way]
    normed = dict(zip("qk", norms, strict=True))
    made = "p0 = MatMul(x, w)\np1 = Add(p0, b)\n" if packed else ""
    one = "$p1 = Slice(p1, start$p, end$p, last)\n" if packed else "$p0 = MatMul(x, w$p)\n$p1 = Add($p0, b$p)\n"
    projected = made + "".join(
        lines(f"{one}$p2 = Reshape($p1, into$p)\n{normed.get(p, '')}", p=p)
        + lines(
            f"$p3 = Transpose<perm=[0,2,1,3]>($p{'n' if normed.get(p) else '2'})\n"
            + (each if p != "v" else "$p4 = Identity($p3)\n"),
            p=p,
        )
        for p in "qkv"
    )
    shared = "".join(lines("$p6 = Expand($p5, twice)\n$p7 = Reshape($p6, heads)\n", p=p) for p in "kv")
    products = f"""
        v5 = Unsqueeze(v4, second)
        {keys}{shared}
        kt = Transpose<perm=[0,1,3,2]>(k7)
        a0 = MatMul(q4, kt)
        a1 = Mul(a0, scale)
        a2 = Softmax<axis=-1>(a1)
        o0 = MatMul(a2, v7)
    """
    body = f"""
        {before}{projected}{kernel or products}
        o1 = Transpose<perm=[0,2,1,3]>(o0)
        o2 = Reshape(o1, back)
        y = MatMul(o2, wo)
    """
    bounds = dict(zip("qkv", ((0, HEADS), (HEADS, HEADS + groups), (HEADS + groups, HEADS + 2 * groups)), strict=True))
    widths = {"": HEADS + 2 * groups} if packed else {p: HEADS if p == "q" else groups for p in "qkv"}
    shapes: Weights = {
        **{f"w{p}": (WIDTH, SIZE * heads) for p, heads in widths.items()},
        **{f"b{p}": (SIZE * heads,) for p, heads in widths.items()},
        **{f"start{p}": ints(SIZE * first) for p, (first, _) in bounds.items() if packed},
        **{f"end{p}": ints(SIZE * end) for p, (_, end) in bounds.items() if packed},
        **({"last": ints(2)} if packed else {}),
        **{f"into{p}": ints(0, 0, HEADS if p == "q" else groups, -1) for p in "qkv"},
        "second": ints(2),
        "twice": ints(1, 1, HEADS // groups, 1, 1),
        "heads": ints(0, HEADS, TOKENS, -1),
        "back": ints(0, 0, -1),
        "scale": scalar(SIZE**-0.5),
        "wo": (HEADS * SIZE, 5),
        **(given or {}),
    }
    opset = 23 if kernel or "RMSNormalization" in body else opset
    return tiny(f"float[N,{TOKENS},{WIDTH}] x => float[] y", body, {**shapes, **weights}, opset=opset,
                imports={"com.microsoft": 1} if "com.microsoft" in each else None)  # fmt: skip


def picked(model: ir.Model) -> tuple[ir.Model, Survey, Inside, Floats]:
    """The model with ranked pairs, its trace, the pairs and a random order."""
    found = rotatable(model, survey_of(model, feed(model)).facts, ("qk",))
    (inside,) = [one for one in found.heads.values() if one.kind == "qk"]
    order = np.random.default_rng(2).permutation(inside.same)
    bases = {one.name: one.same if one is not inside else order for one in found.heads.values()}
    other = rotate(found, bases)
    return other, trace(other, observe(other, feed(other))), inside, order


def masked(model: ir.Model, kept: Ints) -> ir.Model:
    """The original, in which the scores read only some channels of the queries."""
    other = model.clone()
    mask = np.zeros(SIZE, np.float32)
    mask[kept] = 1
    product = next(node for node in other.graph if node.op_type == "Attention" or node.outputs[0].name == "a0")
    value = ir.Value(
        name="mask", const_value=ir.tensor(mask), type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([SIZE])
    )
    other.graph.register_initializer(value)
    scaled = ir.Node("", "Mul", [product.inputs[0], value], num_outputs=1)
    scaled.outputs[0].name = "masked"
    other.graph.insert_before(product, scaled)
    product.replace_input_with(0, scaled.outputs[0])
    return other


@pytest.mark.parametrize(
    ("way", "packed", "kernel", "groups"),
    [
        *((way, False, "", GROUPS) for way in WAYS),
        ("halves", True, "", GROUPS),
        ("one operator", True, "", GROUPS),
        ("halves", False, KERNEL, GROUPS),
        ("a part in one operator", False, KERNEL, GROUPS),
        ("one operator", True, KERNEL, GROUPS),
        *((way, False, "", 1) for way in ("halves", "constant tables", "two halves", "a part", "scaled by position")),
        ("halves", True, "", 1),
    ],
)
def test_without_a_pair_the_scores_lack_its_products(way: str, packed: bool, kernel: str, groups: int) -> None:
    model = rotary(way, packed=packed, kernel=kernel, groups=groups)
    other, survey, inside, order = picked(model)
    assert inside.units is not None
    assert len(order) == WAYS[way][3]
    check_same(run(other, feed(model)), run(model, feed(model)))
    blocks = [block for block in survey.blocks if block.kind == "qk"]
    assert sum(block.units for block in blocks) == len(order)
    assert all(block.ranked == inside.name for block in blocks)
    dead = np.zeros(survey.ids, dtype=bool)
    for block in blocks:
        dead[block.ids[block.units // 2 :]] = True
    trial = trial_of(other, survey, feed(other), ("CPUExecutionProvider",))
    assert prove(trial, blocks, {block.name: block.units // 2 for block in blocks}) == (tuple(blocks), ())
    apply(other.graph, survey, Ledger(dead=dead, arrays={}))
    restore(other)
    members = np.bincount(inside.units)[order.astype(int)]  # 2 of a pair, 1 of a channel that is not rotated
    kept = np.concatenate([order[members == n][: (members == n).sum() // 2] for n in (1, 2)])
    want = run(masked(model, np.flatnonzero(np.isin(inside.units, kept))), feed(model))
    check_same(run(other, feed(model)), want)
    assert np.abs(want["y"] - run(model, feed(model))["y"]).max() > 1e-3
    assert passes_checker(to_bytes(other)) == passes_checker(to_bytes(model)) == ("ONNX Runtime" not in way)
    assert not any(node.metadata_props for node in other.graph)


@pytest.mark.parametrize("turn", ["RotaryEmbedding<num_heads={0}>($p, cosine, sine, places)", "Identity($p)"])
def test_a_kernel_reads_heads_side_by_side(turn: str) -> None:
    given = {"q": HEADS, "k": GROUPS, "v": GROUPS}
    body = "".join(lines("$p = MatMul(x, w$p)\n", p=p) for p in given)
    body += "".join(lines(f"$p4 = {turn.format(given[p])}\n", p=p) for p in "qk")
    body += f"o = Attention<q_num_heads={HEADS}, kv_num_heads={GROUPS}>(q4, k4, v)\ny = MatMul(o, wo)"
    weights: Weights = {
        **{f"w{p}": (WIDTH, SIZE * heads) for p, heads in given.items()},
        **(FORMS["one operator"][2] if "cosine" in turn else {}),
        "wo": (HEADS * SIZE, 5),
    }
    model = tiny(f"float[N,{TOKENS},{WIDTH}] x => float[] y", body, weights, opset=23)
    found = rotatable(model, survey_of(model, feed(model)).facts, ("qk", "vo"))
    assert [(one.kind, one.units is None) for one in found.heads.values()] == [("qk", "Id" in turn), ("vo", True)]
    other = rotate(found, bases_of(found))
    check_same(run(other, feed(model)), run(model, feed(model)))
    survey = narrowed_equals_masked(other, feed(other), kinds=("qk", "vo"))
    assert {(block.kind, block.units) for block in survey.blocks} == {("qk", 8 if "Id" in turn else 4), ("vo", SIZE)}


def test_queries_and_keys_share_what_they_gather() -> None:
    other, survey, *_ = picked(rotary("halves"))
    dead = np.zeros(survey.ids, dtype=bool)
    (block,) = [block for block in survey.blocks if block.kind == "qk"]
    dead[block.ids[1:]] = True
    apply(other.graph, survey, Ledger(dead=dead, arrays={}))
    gathers = [node for node in other.graph if node.op_type == "Gather"]
    assert sorted(node.inputs[0].name for node in gathers) == ["cosine", "sine"]
    assert all(len(list(node.outputs[0].uses())) == 2 for node in gathers)


def test_the_weight_of_sliced_queries_is_masked_where_it_makes_them() -> None:
    other, survey, *_ = picked(rotary("halves", packed=True))
    (block,) = [block for block in survey.blocks if block.kind == "qk"]
    assert {(slot.initializer, slot.role, slot.index.size) for slot in block.slots} == {
        ("w", "producer", SIZE * (HEADS + GROUPS)),
        ("b", "passenger", SIZE * (HEADS + GROUPS)),
        ("w", "consumer", SIZE * HEADS),
        ("b", "consumer", SIZE * HEADS),
    }
    narrowed_equals_masked(other, feed(other), kinds=("qk", "vo"))


def test_what_bends_rotated_queries_is_refused_by_name() -> None:
    model = rotary("halves", keys="k8 = Relu(k4)\nk5 = Unsqueeze(k8, second)\n")
    found = rotatable(model, survey_of(model, feed(model)).facts, ("qk",))
    assert not any(one.kind == "qk" for one in found.heads.values())
    assert ("k8", BENDS) in [(refusal.value, refusal.reason) for refusal in found.refusals]


def test_pairs_are_ranked_by_what_varies_in_the_scores() -> None:
    rng = np.random.default_rng(0)
    count, angles = 400, 1000.0 ** -np.arange(4.0)
    sizes = np.array([1.0, 0.5, 2.0, 0.7])
    queries, keys = (rng.normal(size=(count, 4, 2)) * sizes[:, None] for _ in range(2))
    keys[:, 3] += 30.0  # a mean that hardly turns adds the same to all scores
    turn = np.exp(1j * np.outer(np.arange(count), angles))
    rows = [x[..., 0] + 1j * x[..., 1] for x in (queries, keys)]

    def sums(x: Floats) -> Stats:
        return Stats(gram=(x**2).sum(axis=0), total=x.sum(axis=0), count=len(x))

    apart = [[[sums(x.reshape(count, 8))]] for x in (queries, keys)]
    after = [np.stack([(row * turn).real, (row * turn).imag], axis=2).reshape(count, 8) * 0.3 for row in rows]
    order = order_of_pairs(apart[0], apart[1], [sums(x) for x in after], np.repeat(np.arange(4), 2))
    left, right = (x.reshape(count, 4, 2).swapaxes(0, 1) for x in after)
    scores = left @ right.swapaxes(1, 2)
    assert order.tolist() == np.argsort(-scores.var(axis=2).mean(axis=1)).tolist() == [2, 0, 3, 1]
