"""Mixtures of experts: matrices that are chosen at run time out of a stack of weights."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tests.oracle import narrowed_equals_masked
from tests.tiny import feed, ints, lines, tiny

HIDDEN, OUT = 8, 5


@pytest.mark.parametrize("pick", ["w = Gather<axis=0>(experts, expert)", "w = GatherND(experts, expert)"])
def test_a_single_expert(pick: str) -> None:
    """The weight is picked at run time, for all rows at once: it goes on being a weight."""
    model = tiny(
        "float[N,6] x, int64[1] expert => float[] y",
        f"s = MatMul(x, stem)\nt = Tanh(s)\n{pick}\nv = Reshape(w, shape)\na = MatMul(t, v)\nr = Relu(a)\n"
        "b = MatMul(r, down)\nh = Relu(b)\ny = MatMul(h, head)",
        {"stem": (6, 5), "experts": (3, 5, HIDDEN), "shape": ints(5, HIDDEN), "down": (HIDDEN, 7), "head": (7, OUT)},
    )
    arrays = feed(model) | {"expert": np.array([1])}
    survey = narrowed_equals_masked(model, arrays)
    assert sorted(b.units for b in survey.blocks) == [5, 7, HIDDEN]
    (first,) = [b for b in survey.blocks if b.units == 5]
    assert [(s.initializer, s.axis) for s in first.consumers] == [("experts", 1)]


MIXTURE = """
    g = MatMul(x, router)
    scores, ids = TopK<axis=1>(g, two)
    picked = Reshape(ids, flat)
    x1 = Unsqueeze(x, one)
    x2 = Expand(x1, twice)
    tokens = Reshape(x2, rows)
    $up
    first, second = Split<axis=1, num_outputs=2>(u)
    s = Sigmoid(first)
    h = Mul(s, second)
    $down
    o2 = Reshape(o, apart)
    y = ReduceSum<keepdims=0>(o2, one)"""
LEFT = """$wt = Gather(w$name, picked)
    $wc = Unsqueeze($x, two_)
    $wm = MatMul($wt, $wc)
    $y = Squeeze($wm, two_)"""
RIGHT = """$wt = Gather(w$name, picked)
    $wp = Transpose<perm=[0,2,1]>($wt)
    $wc = Unsqueeze($x, one)
    $wm = MatMul($wc, $wp)
    $y = Squeeze($wm, one)"""
FUSED = """$wt = Gather(w$name, picked)
    $wc = Unsqueeze($x, one)
    $wm = com.microsoft.FusedMatMul<transB=1>($wc, $wt)
    $y = Squeeze($wm, one)"""
AXES = {"one": ints(1), "two_": ints(2), "two": ints(2), "flat": ints(-1), "twice": ints(1, 2, 1)}


def mixture(product: str) -> ir.Model:
    """Two of three gated experts for every row."""
    parts = {n: lines(product, w=n, name=n, x=x, y=y) for n, x, y in (("up", "tokens", "u"), ("down", "h", "o"))}
    return tiny(
        "float[N,6] x => float[] y",
        lines(MIXTURE, **parts),
        {"router": (6, 3), "wup": (3, 2 * HIDDEN, 6), "wdown": (3, OUT, HIDDEN), **AXES}
        | {"rows": ints(-1, 6), "apart": ints(-1, 2, OUT)},
        imports={"com.microsoft": 1},
    )


@pytest.mark.parametrize("product", [LEFT, RIGHT, FUSED], ids=["left", "right", "fused"])
def test_a_mixture_of_experts_shares_one_width(product: str) -> None:
    model = mixture(product)
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert (block.kind, block.units) == ("mlp", HIDDEN)
    found = [(s.initializer, s.axis, s.role, s.index.shape[1]) for s in block.slots]
    assert found == [("wup", 1, "producer", 2), ("wdown", 2, "consumer", 1)]


def test_experts_of_two_products_are_consumed_by_both() -> None:
    """Two tokens at once read the output of one stack: both sources feed its consumer."""
    model = tiny(
        "float[N,6] x, int64[N] ids => float[] y",
        "a = MatMul(x, u)\nb = Relu(a)\nc = Sigmoid(a)\nw = Gather(stack, ids)\nb1 = Unsqueeze(b, one)\n"
        "c1 = Unsqueeze(c, one)\np = MatMul(b1, w)\nq = MatMul(c1, w)\ny = Sub(p, q)",
        {"u": (6, HIDDEN), "stack": (3, HIDDEN, OUT), "one": ints(1)},
    )
    arrays = feed(model) | {"ids": np.array([2, 0, 1])}
    (block,) = narrowed_equals_masked(model, arrays).blocks
    assert [(s.initializer, s.axis) for s in block.consumers] == [("stack", 1)]
    assert len(block.probes) == 1
    assert len(block.probes[0].also) == 1


def test_a_stack_that_is_scaled_first_is_an_activation() -> None:
    """A value computed from a weight cannot stand for it: the channels that it contracts stay."""
    model = tiny(
        "float[N,6] x, int64[N] ids => float[] y",
        "a = MatMul(x, u)\nb = Relu(a)\nw = Gather(stack, ids)\nv = Exp(w)\nb1 = Unsqueeze(b, one)\n"
        "p = MatMul(b1, v)\nr = Relu(p)\ny = MatMul(r, head)",
        {"u": (6, HIDDEN), "stack": (3, HIDDEN, 7), "one": ints(1), "head": (7, OUT)},
    )
    arrays = feed(model) | {"ids": np.array([2, 0, 1])}
    survey = narrowed_equals_masked(model, arrays)
    assert [b.units for b in survey.blocks] == [7]
    assert "product of two activations" in {r.value: r.reason for r in survey.refusals}["u"]
