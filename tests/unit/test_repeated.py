"""Multiply-accumulates in bodies that run more than once."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.observe import observe
from onnxgrail.graph.cost import counting
from onnxgrail.graph.trace.tracer import trace
from tests.tiny import feed, ints, tiny

STEP = """
    c, seen = Loop (times, , start) <
        body = step (int64 i, bool go, float[N,8] s) => (bool on, float[N,8] next, float[N,8] kept) {{
            on = {on}
            m = MatMul(s, w)
            {more}
            next = Tanh({last})
            kept = Identity(next)
        }}
    >
    y = MatMul(c, down)
"""
SIGNATURE = "float[N,8] start => float[] y"
WEIGHTS = {"w": (8, 8), "down": (8, 5), "times": np.array(4)}
N, ONCE, AFTER = 3, 3 * 8 * 8, 3 * 8 * 5


def counted(model: ir.Model, **more: object) -> int:
    return counting.macs(model, trace(model, observe(model, feed(model) | more)))


def test_passes_of_a_loop() -> None:
    model = tiny(SIGNATURE, STEP.format(on="Identity(go)", more="", last="m"), WEIGHTS)
    assert counted(model) == 4 * ONCE + AFTER


def test_a_loop_that_ends_early_tells_by_what_it_collects() -> None:
    model = tiny(SIGNATURE, STEP.format(on="Less(i, one)", more="", last="m"), WEIGHTS | {"one": np.array(1)})
    assert counted(model) == 2 * ONCE + AFTER


def test_a_loop_without_a_known_limit_is_not_counted() -> None:
    body = STEP.format(on="Less(i, one)", more="", last="m").replace("c, seen", "c").replace(", float[N,8] kept", "")
    body = body.replace("kept = Identity(next)", "").replace("Loop (times", "Loop (")
    model = tiny(SIGNATURE, body, {"w": (8, 8), "down": (8, 5), "one": np.array(1)})
    assert counted(model) == AFTER
    found = onnxgrail.compare(model, model)
    assert found.a.macs is None  # what is not known is not told to be less
    known = tiny(SIGNATURE, STEP.format(on="Identity(go)", more="", last="m"), WEIGHTS)
    assert onnxgrail.compare(known, known).a.macs == (4 * ONCE + AFTER) // N


def test_bodies_inside_bodies() -> None:
    """The larger branch of an If counts, and a target shape that a constant holds is known."""
    more = """
        r = Reshape(m, shape)
        p = If (on) <
            then_branch = yes () => (float[N,8] t) { t = MatMul(r, w) },
            else_branch = no () => (float[N,8] e) { a = MatMul(r, up)  e = MatMul(a, back) }
        >
    """
    weights = {**WEIGHTS, "up": (8, 9), "back": (9, 8), "shape": ints(-1, 8)}
    text = STEP.replace("{on}", "Identity(go)").replace("{more}", more).replace("{last}", "p")
    model = tiny(SIGNATURE, text.replace("{{", "{").replace("}}", "}"), weights)
    assert counted(model) == 4 * (ONCE + 2 * N * 8 * 9) + AFTER


@pytest.mark.parametrize("axis", [0, 1])
def test_passes_of_a_scan(axis: int) -> None:
    shape = ["T", "N"] if axis == 0 else ["N", "T"]
    body = f"""
        last, all = Scan <num_scan_inputs = 1, scan_input_axes = [{axis}], body = step (float[N,8] s, float[N,6] x)
            => (float[N,8] next, float[N,8] out) {{
                a = MatMul(x, u)  b = MatMul(s, w)  c = Add(a, b)  next = Tanh(c)  out = Identity(next)
            }}> (start, x)
        y = MatMul(last, down)
    """
    signature = f"float[N,8] start, float[{shape[0]},{shape[1]},6] x => float[] y"
    model = tiny(signature, body, {"u": (6, 8), "w": (8, 8), "down": (8, 5)})
    assert counted(model) == 4 * (ONCE + N * 6 * 8) + AFTER
