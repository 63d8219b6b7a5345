"""Bodies of If and Loop: what they read of the outer graph stays as it is, whatever happens around them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tests.oracle import killed, narrowed, narrowed_equals_masked
from tests.tiny import feed, ints, tiny

NESTED = """
    c = Loop (times, , start) <
        body = step (int64 i, bool go, float[N,{width}] s) => (bool on, float[N,{width}] next) {{
            on = Identity(go)
            next = If (flag) <
                then_branch = yes () => (float[N,{width}] t) {{ {read} }},
                else_branch = no () => (float[N,{width}] e) {{ e = Neg(s) }}
            >
        }}
    >
"""
MAIN = "a = MatMul(x, up)\nb = Add(a, bias)\nr = Relu(b)\ny = MatMul(r, down)\n"
SIDE = "k = MatMul(x, side)\nl = Sigmoid(k)\nz = MatMul(l, end)"
WEIGHTS = {
    "up": (6, 8), "bias": (8,), "down": (8, 5), "side": (6, 7), "end": (7, 2), "times": np.array(2)
}  # fmt: skip


def model(read: str, width: int, made: str = "", main: str = MAIN, **more: tuple[int, ...] | np.ndarray) -> ir.Model:
    """A main branch, a side branch, and a loop with a branch inside that reads something of the main one."""
    return tiny(
        f"float[N,6] x, float[N,{width}] start => float[] y, float[] c, float[] z",
        f"{made}\n{NESTED.format(width=width, read=read)}\n{main}{SIDE}",
        {**WEIGHTS, "flag": np.array(True), **more},
    )


@pytest.mark.parametrize(
    ("read", "width", "made", "more"),
    [
        ("t = Add(s, bias)", 8, "", {}),
        ("t = MatMul(s, v)", 8, "", {"v": (8, 8)}),
        ("w = Reshape(s, shape)\nt = Relu(w)", 8, "", {"shape": ints(-1, 8)}),
    ],
    ids=["bias", "another weight", "shape"],
)
def test_constants_that_a_body_reads_keep_their_width(
    read: str, width: int, made: str, more: dict[str, tuple[int, ...]]
) -> None:
    """A constant that rides along is cloned, and the shape operand too; the body goes on with the old ones."""
    main = MAIN.replace("r = Relu(b)", "q = Reshape(b, shape)\nr = Relu(q)") if "shape" in more else MAIN
    source = model(read, width, made, main, **more)
    survey = narrowed_equals_masked(source, feed(source))
    assert sorted(b.units for b in survey.blocks) == [7, 8]
    slim = narrowed(source, survey, killed(survey, 0.5))
    for name in ("bias", *more):
        if name in read:
            assert tuple(slim.graph.initializers[name].shape or ()) == tuple(
                source.graph.initializers[name].shape or ()
            )


@pytest.mark.parametrize("folded", [False, True])
def test_weights_that_a_body_reads(folded: bool) -> None:
    """The weight itself stops its channels; the source of one that is computed from it does not."""
    made = "made = Transpose(raw)" if folded else ""
    read = "p = MatMul(s, raw)" if folded else "p = MatMul(x, up)"
    main = MAIN.replace("up", "made") if folded else MAIN
    source = model(f"{read}\nq = ReduceMean(p)\nt = Mul(s, q)", 8, made, main, raw=(8, 6))
    survey = narrowed_equals_masked(source, feed(source))
    assert sorted(b.units for b in survey.blocks) == ([7, 8] if folded else [7])
    if not folded:
        assert any(r.value == "up" and r.op == "Loop" and "also read by" in r.reason for r in survey.refusals)


def test_an_activation_that_an_inner_body_reads() -> None:
    loop = NESTED.format(width=8, read="t = Add(s, r)")
    main = MAIN.replace("y = ", f"{loop}\ny = ")
    source = tiny(
        "float[N,6] x, float[N,8] start => float[] y, float[] c, float[] z",
        main + SIDE,
        {**WEIGHTS, "flag": np.array(True)},
    )
    survey = narrowed_equals_masked(source, feed(source))
    assert [b.units for b in survey.blocks] == [7]
    assert any(r.value == "up" and r.reason == "the body of Loop reads it" for r in survey.refusals)


def test_a_loop_refuses_only_what_it_carries() -> None:
    """Before the loop and after it narrowing goes on."""
    loop = NESTED.format(width=5, read="t = Tanh(s)").replace("start", "y")
    source = tiny(
        "float[N,6] x => float[] out, float[] z",
        f"{MAIN}{loop}\nd = MatMul(c, more)\ne = Relu(d)\nout = MatMul(e, last)\n{SIDE}",
        {**WEIGHTS, "flag": np.array(True), "more": (5, 9), "last": (9, 2)},
    )
    survey = narrowed_equals_masked(source, feed(source))
    assert sorted(b.units for b in survey.blocks) == [7, 8, 9]
    (stuck,) = [r for r in survey.refusals if r.op == "Loop"]
    assert stuck.reason == "the body of Loop handles it"
    assert stuck.value == "down"


@pytest.mark.parametrize("own", [False, True], ids=["outer", "own"])
def test_layers_inside_branches_are_spoken_of(own: bool) -> None:
    """Weights of the outer graph that only branches read, and weights that a branch holds itself."""
    up, down = "a = MatMul(x, up)\nr = Relu(a)\n", "= MatMul(r, down)"
    source = tiny(
        "float[N,6] x, bool flag => float[] y",
        f"y = If (flag) <then_branch = one () => (float[N,5] t) {{ {up}t {down} }}, "
        "else_branch = two () => (float[N,6] e) { e = Neg(x) }>",
        {"up": (6, 8), "down": (8, 6)},
    )
    node = source.graph[0]
    if own:
        branch = node.attributes["then_branch"].as_graph()
        for name in ("up", "down"):
            value = source.graph.initializers.pop(name)
            branch.initializers[name] = value
    survey = narrowed_equals_masked(source, feed(source) | {"flag": np.array(True)})
    assert not survey.blocks
    (stuck,) = survey.refusals
    assert (stuck.op, stuck.node, stuck.value) == ("If", "If_0", "down")
    assert stuck.reason.startswith("its layers lie inside the branches of If If_0:")


def test_layers_inside_a_loop_are_spoken_of() -> None:
    source = model("t = MatMul(s, v)", 8, v=(8, 8))
    survey = narrowed_equals_masked(source, feed(source))
    (stuck,) = [r for r in survey.refusals if "layers" in r.reason]
    assert (stuck.op, stuck.value) == ("Loop", "v")
    assert "inside the body of Loop" in stuck.reason
