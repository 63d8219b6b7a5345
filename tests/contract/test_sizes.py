"""Sizes computed from shapes: each comes right by itself, is corrected, or is kept full where it is measured."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.graph.trace.survey import Survey
from tests.masks import masked
from tests.oracle import check_same, narrowed, narrowed_equals_masked, run, survey_of
from tests.tiny import feed, ints, tiny

ATTENTION = {"wq": (6, 8), "wk": (6, 8), "wv": (6, 8), "wo": (8, 6)}
MERGED = """
    q = MatMul(x, wq)
    k = MatMul(x, wk)
    v = MatMul(x, wv)
    xs = Shape(x)
    b = Gather(xs, zero)
    s = Gather(xs, one)
    bh = Mul(b, four)
    split = Concat<axis=0>(b, s, four, two)
    qr = Reshape(q, split)
    kr = Reshape(k, split)
    vr = Reshape(v, split)
    qt = Transpose<perm=[0,2,1,3]>(qr)
    kt = Transpose<perm=[0,2,1,3]>(kr)
    vt = Transpose<perm=[0,2,1,3]>(vr)
    merged = Concat<axis=0>(bh, s, two)
    qm = Reshape(qt, merged)
    km = Reshape(kt, merged)
    vm = Reshape(vt, merged)
    kx = Transpose<perm=[0,2,1]>(km)
    a = MatMul(qm, kx)
    p = Softmax(a)
    o = MatMul(p, vm)"""
NUMBERS = {"zero": ints(0), "one": ints(1), "two": ints(2), "four": ints(4), "joined": ints(0, 0, -1)}


def merged(tail: str, **weights: np.ndarray) -> ir.Model:
    """Attention with heads merged into the batch, and what follows it."""
    body = f"{MERGED}\n{tail}\ny = MatMul(z, wo)"
    return tiny("float[N,S,6] x => float[] y", body, {**ATTENTION, **NUMBERS, **weights})


def heads(model: ir.Model) -> Survey:
    """The survey of a model with one block of four heads."""
    survey = narrowed_equals_masked(model, feed(model))
    assert [(b.kind, b.units) for b in survey.blocks] == [("heads", 4)]
    return survey


def test_the_batch_counted_back_from_merged_heads() -> None:
    """Bloom: batch = Shape(o)[0] / heads.  Following the narrowed tensor it would lose samples."""
    model = merged("""
        os = Shape(o)
        first = Gather(os, zero)
        batch = Div(first, four)
        apart = Concat<axis=0>(batch, four, s, two)
        oa = Reshape(o, apart)
        ot = Transpose<perm=[0,2,1,3]>(oa)
        z = Reshape(ot, joined)""")
    assert heads(model).sizes.staying == {"os"}


def test_one_target_with_sizes_of_both_sorts() -> None:
    """XGLM: the merged size is a product that does not follow, beside a length measured on a narrowed tensor."""
    model = merged("""
        os = Shape(o)
        length = Gather(os, one)
        again = Concat<axis=0>(bh, length, two)
        same = Reshape(o, again)
        apart = Concat<axis=0>(b, four, s, two)
        oa = Reshape(same, apart)
        ot = Transpose<perm=[0,2,1,3]>(oa)
        z = Reshape(ot, joined)""")
    assert not heads(model).sizes.staying


def test_a_size_that_follows_is_left_to_follow() -> None:
    """Nothing is put in front of a Reshape whose target is measured on a tensor that loses the same heads."""
    model = merged(
        """
        os = Shape(o)
        same = Reshape(o, os)
        apart = Concat<axis=0>(b, minus, s, two)
        oa = Reshape(same, apart)
        ot = Transpose<perm=[0,2,1,3]>(oa)
        z = Reshape(ot, joined)""",
        minus=ints(-1),
    )
    survey = heads(model)
    assert survey.sizes.right["same"].all()
    dead = np.isin(np.arange(survey.ids), survey.blocks[0].ids[:1])
    slim = narrowed(model, survey, dead)
    node = next(n for n in slim.graph if n.outputs[0].name == "same")
    assert node.inputs[1] is not None
    assert node.inputs[1].name == "os"


def test_a_measured_shape_that_stays_and_is_a_target_itself() -> None:
    """The Shape node feeds a Reshape directly and arithmetic that needs the full size."""
    model = merged("""
        os = Shape(o)
        first = Gather(os, zero)
        batch = Div(first, four)
        same = Reshape(o, os)
        apart = Concat<axis=0>(batch, four, s, two)
        oa = Reshape(same, apart)
        ot = Transpose<perm=[0,2,1,3]>(oa)
        z = Reshape(ot, joined)""")
    assert heads(model).sizes.staying == {"os"}


def test_a_width_borrowed_from_another_tensor() -> None:
    """The target's width is that of a hidden layer which is narrowed differently."""
    model = tiny(
        "float[N,S,6] x => float[] y",
        """
        h = MatMul(x, w1)
        r = Relu(h)
        g = MatMul(r, w2)
        hs = Shape(h)
        c = Gather(hs, two)
        b = Shape<start=0, end=2>(x)
        target = Concat<axis=0>(b, c, one)
        t = Reshape(g, target)
        z = Squeeze(t, three)
        y = MatMul(z, w3)""",
        {"w1": (6, 8), "w2": (8, 8), "w3": (8, 3), "two": ints(2), "one": ints(1), "three": ints(3)},
    )
    for seed in range(3):
        survey = narrowed_equals_masked(model, feed(model), 0.5, seed=seed)
    assert [b.units for b in survey.blocks] == [8, 8]
    dead = np.isin(np.arange(survey.ids), survey.blocks[0].ids[:3])  # only one of the two
    assert narrowed(model, survey, dead).graph.initializers["w2"].shape == (5, 8)


def test_a_size_that_reaches_numbers_stays_full() -> None:
    """A mean by hand divides by the measured width."""
    model = tiny(
        "float[N,6] x => float[] y",
        """
        h = MatMul(x, w1)
        r = Relu(h)
        n = Shape<start=1, end=2>(r)
        f = Cast<to=1>(n)
        d = Div(r, f)
        y = MatMul(d, w2)""",
        {"w1": (6, 8), "w2": (8, 3)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert [b.units for b in survey.blocks] == [8]
    assert survey.sizes.staying == {"n"}


@pytest.mark.parametrize("bias", ["zeros = CastLike(zero, x)\nb = Expand(zeros, ws)", "b = ConstantOfShape(ws)"])
def test_a_bias_made_from_the_shape_of_its_weight(bias: str) -> None:
    """Dynamo without optimisation writes a missing bias as zeros of the weight's size."""
    model = tiny(
        "float[N,3,4,4] x => float[] y",
        f"ws = Shape<start=0, end=1>(w1)\n{bias}\nh = Conv(x, w1, b)\nr = Relu(h)\ny = Conv(r, w2)",
        {"w1": (8, 3, 1, 1), "w2": (4, 8, 1, 1), "zero": np.zeros((), np.int64)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert [b.units for b in survey.blocks] == [8]
    slim = narrowed(model, survey, np.isin(np.arange(survey.ids), survey.blocks[0].ids[:5]))
    weights = {n: tuple(v.shape or ()) for n, v in slim.graph.initializers.items() if n.startswith("w")}
    assert weights == {"w1": (3, 3, 1, 1), "w2": (4, 3, 1, 1)}  # no wide copy stays


def test_a_computed_weight_of_a_shape_that_nobody_can_tell() -> None:
    """Shape inference does not see through the Identity in front of the target, and another node reads the numbers."""
    body = "t = Identity(target)\nw = Reshape(flat, t)\nh = Conv(x, w1)\nr = Relu(h)\ny = Conv(r, w)\nz = Abs(flat)"
    weights = {"w1": (8, 3, 1, 1), "flat": (32,), "target": ints(4, 8, 1, 1)}
    model = tiny("float[N,3,4,4] x => float[] y, float[32] z", body, weights, recorded=False)
    survey = survey_of(model, feed(model))
    assert not survey.blocks
    assert any("does not tell its shape" in r.reason for r in survey.refusals)


def test_a_computed_weight_of_a_known_shape() -> None:
    body = "w = Reshape(flat, target)\nh = Conv(x, w1)\nr = Relu(h)\ny = Conv(r, w)"
    model = tiny("float[N,3,4,4] x => float[] y", body, {"w1": (8, 3, 1, 1), "flat": (32,), "target": ints(4, 8, 1, 1)})
    assert [b.units for b in narrowed_equals_masked(model, feed(model)).blocks] == [8]


@pytest.mark.parametrize("number", [0, 1])
def test_a_size_borrowed_from_a_block_of_as_many_units(number: int) -> None:
    """It is right by chance as long as both blocks lose as many units; here only one of them does."""
    body = """
        a = MatMul(x, wa)
        b = MatMul(x, wb)
        first = Shape<start=0, end=2>(x)
        width = Shape<start=2>(a)
        target = Concat<axis=0>(first, width)
        r = Reshape(b, target)
        y = MatMul(a, va)
        z = MatMul(r, vb)"""
    weights = {"wa": (6, 3), "wb": (6, 3), "va": (3, 2), "vb": (3, 2)}
    model = tiny("float[N,S,6] x => float[] y, float[] z", body, weights)
    arrays = feed(model)
    survey = survey_of(model, arrays)
    assert [b.units for b in survey.blocks] == [3, 3]
    dead = np.zeros(survey.ids, dtype=bool)
    dead[survey.blocks[number].ids[:2]] = True
    check_same(run(narrowed(model, survey, dead), arrays), run(masked(model, survey, dead), arrays))


def test_a_size_borrowed_from_the_second_part_of_a_block() -> None:
    """Which part of a block loses units is for the selector to say; the size of space follows neither."""
    body = """
        h = Conv(x, w)
        a, b = Split<axis=1>(h, parts)
        r = Relu(a)
        c = Concat<axis=1>(b, r)
        batch = Shape<start=0, end=1>(x)
        height = Shape<start=1, end=2>(b)
        target = Concat<axis=0>(batch, five, height, two)
        z = Resize<mode="nearest">(c, , , target)
        y = Conv(z, v)"""
    weights = {"w": (5, 3, 1, 1), "v": (2, 5, 1, 1), "parts": ints(2, 3), "five": ints(5), "two": ints(2)}
    model = tiny("float[N,3,2,2] x => float[] y", body, weights)
    arrays = feed(model)
    survey = survey_of(model, arrays)
    dead = np.zeros(survey.ids, dtype=bool)
    dead[survey.blocks[0].ids[3:]] = True
    check_same(run(narrowed(model, survey, dead), arrays), run(masked(model, survey, dead), arrays))


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_quotient_that_is_right_for_small_shares_alone(gone: int) -> None:
    """(4 units + 2 that stay) * 2 // 3 is the number of units while at most two of them go."""
    body = """
        h = MatMul(x, up)
        a, b = Split<axis=2>(h, parts)
        first = Shape<start=0, end=2>(x)
        packed = Shape<start=2>(h)
        width = Div(packed, three)
        target = Concat<axis=0>(first, width, two)
        r = Reshape(a, target)
        t = Transpose<perm=[0,2,1,3]>(r)
        s = Softmax(t)
        back = Transpose<perm=[0,2,1,3]>(s)
        z = Reshape(back, joined)
        y = MatMul(z, down)"""
    weights = {"up": (6, 12), "down": (8, 5), "parts": ints(8, 4), "three": ints(3), "two": ints(2)}
    model = tiny("float[N,S,6] x => float[] y, float[] b", body, {**weights, "joined": ints(0, 0, -1)})
    arrays = feed(model)
    survey = survey_of(model, arrays)
    assert [b.units for b in survey.blocks] == [4]
    dead = np.zeros(survey.ids, dtype=bool)
    dead[survey.blocks[0].ids[:gone]] = True
    check_same(run(narrowed(model, survey, dead), arrays), run(masked(model, survey, dead), arrays))
