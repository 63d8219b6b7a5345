"""Streamed states: `--kv-io` narrows inputs and outputs of recurrent layers and of streamed convolutions alike."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrail
from onnxgrail.graph.flatten.states import STATE
from onnxgrail.graph.io.serial import to_bytes
from tests.tiny import ints, tiny

UNITS, DEAD, STEPS = 16, 8, 4
PACKED = """
    h = Gather<axis=0>(state, zero)
    c = Gather<axis=0>(state, one)
    h0 = Unsqueeze(h, first)
    c0 = Unsqueeze(c, first)
    s, hn, cn = LSTM<hidden_size=16>(x, w, r, b, , h0, c0)
    f = Squeeze(s, second)
    y = MatMul(f, v)
    next = Concat<axis=0>(hn, cn)
"""
DIRECT = """
    s, next = GRU<hidden_size=16>(x, w, r, b, , state)
    f = Squeeze(s, second)
    y = MatMul(f, v)
"""
UNROLLED = """
    h4 = Slice(state, front, back, last)
    c4 = Slice(state, back, end, last)
    h = Squeeze(h4, last)
    c = Squeeze(c4, last)
    gx = MatMul(x, w)
    gh = MatMul(h, r)
    g0 = Add(gx, gh)
    g1 = Add(g0, b)
    i, f, g, o = Split<axis=1, num_outputs=4>(g1)
    si = Sigmoid(i)
    sf = Sigmoid(f)
    tg = Tanh(g)
    so = Sigmoid(o)
    old = Mul(sf, c)
    new = Mul(si, tg)
    cn = Add(old, new)
    tc = Tanh(cn)
    hn = Mul(so, tc)
    y = MatMul(hn, v)
    h5 = Unsqueeze(hn, last)
    c5 = Unsqueeze(cn, last)
    next = Concat<axis=2>(h5, c5)
"""
APART = """
    gx = MatMul(x, w)
    gh = MatMul(state, r)
    g0 = Add(gx, gh)
    g1 = Add(g0, b)
    z0, n0 = Split<axis=1, num_outputs=2>(g1)
    z = Sigmoid(z0)
    n = Tanh(n0)
    u = Sub(whole, z)
    old = Mul(z, state)
    new = Mul(u, n)
    next = Add(old, new)
    y = MatMul(next, v)
"""
CACHE = """
    a = Conv(x, w1)
    p = Relu(a)
    e = Concat<axis=2>(state, p)
    y = Conv(e, w2)
    next = Slice(e, start, stop, second_axis)
"""


def recurrent(kind: str) -> tuple[ir.Model, dict[str, Any], tuple[int, ...]]:
    """A layer half of whose units never leave zero, the shape of its first input and of its state."""
    gates = 4 if kind == "lstm" else 3
    rng = np.random.default_rng(0)
    alive = np.arange(UNITS) % 2 == 0
    rows = np.tile(alive, gates)
    w = rng.normal(size=(1, gates * UNITS, 6)) * rows[:, None]
    r = rng.normal(size=(1, gates * UNITS, UNITS)) * rows[:, None] * alive / 4
    b = np.concatenate([rng.normal(size=gates * UNITS) * rows] * 2)[None]
    arrays = {name: array.astype(np.float32) for name, array in (("w", w), ("r", r), ("b", b))}
    names = {"zero": np.array(0), "one": np.array(1), "first": ints(0), "second": ints(1)}
    layers = 2 if kind == "lstm" else 1
    model = tiny(
        f"float[S,N,6] x, float[{layers},N,{UNITS}] state => float[] y, float[] next",
        PACKED if kind == "lstm" else DIRECT,
        {**arrays, **{k: n for k, n in names.items() if k in (PACKED if kind == "lstm" else DIRECT)}, "v": (UNITS, 4)},
    )
    return model, {"x": (3, 2, 6)}, (layers, 2, UNITS)


def written_out(body: str) -> tuple[ir.Model, dict[str, Any], tuple[int, ...]]:
    """A step with gates as nodes, in which half of the units never leave zero."""
    rng, gates = np.random.default_rng(0), 4 if body is UNROLLED else 2
    alive = np.arange(UNITS) % 2 == 0
    columns = np.tile(alive, gates)
    arrays = {
        "w": rng.normal(size=(6, gates * UNITS)) * columns,
        "r": rng.normal(size=(UNITS, gates * UNITS)) * columns * alive[:, None] / 4,
        "b": rng.normal(size=gates * UNITS) * columns,
        "whole": np.ones(1),
    }
    numbers = {"front": ints(0), "back": ints(1), "end": ints(2), "last": ints(2)}
    given = {**{name: array.astype(np.float32) for name, array in arrays.items()}, **numbers, "v": (UNITS, 4)}
    shape = (UNITS, 2) if body is UNROLLED else (UNITS,)
    model = tiny(
        f"float[N,6] x, float[N,{','.join(map(str, shape))}] state => float[] y, float[] next",
        body,
        {name: weight for name, weight in given.items() if re.search(rf"\b{name}\b", body)},
    )
    return model, {"x": (2, 6)}, (2, *shape)


def convolution() -> tuple[ir.Model, dict[str, Any], tuple[int, ...]]:
    """Two convolutions with a cache of two steps between them; half of the channels are dead."""
    rng = np.random.default_rng(0)
    w1 = (rng.normal(size=(UNITS, 6, 1)) * (np.arange(UNITS) % 2 == 0)[:, None, None]).astype(np.float32)
    model = tiny(
        f"float[N,6,T] x, float[N,{UNITS},2] state => float[] y, float[] next",
        CACHE,
        {"w1": w1, "w2": (4, UNITS, 3), "start": ints(-2), "stop": ints(2**40), "second_axis": ints(2)},
    )
    return model, {"x": (2, 6, 5)}, (2, UNITS, 2)


CASES = {
    "lstm": lambda: recurrent("lstm"),
    "gru": lambda: recurrent("gru"),
    "conv": convolution,
    "lstm written out": lambda: written_out(UNROLLED),
    "gates written out": lambda: written_out(APART),
}


def streamed(model: bytes, shape: tuple[int, ...], state: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    """Outputs of several steps, each fed with the state that the one before it handed on."""
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    found, held = [], np.zeros(state, np.float32)
    for step in range(STEPS):
        x = np.random.default_rng(step).normal(size=shape).astype(np.float32)
        y, held = session.run(["y", "next"], {"x": x, "state": held})
        found.append(y)
    return found


@pytest.mark.parametrize("case", CASES)
def test_dead_units_leave_the_state_and_nothing_changes(case: str) -> None:
    model, shapes, state = CASES[case]()
    content = to_bytes(model)
    feed = {"x": np.ones(shapes["x"], np.float32), "state": np.zeros(state, np.float32)}
    choices: dict[str, Any] = {"unit_ratio": 0.5, "round_to": 1, "compensate": "none", "selector": "l2"}
    result = onnxgrail.compress(content, data=[feed], kv_io=True, **choices)
    ports = {port["name"]: (port["before"], port["after"]) for port in result.report.data["interface"]}
    assert ports == {"state": (UNITS, DEAD), "next": (UNITS, DEAD)}
    assert any(note.endswith("feed and read them at their new sizes") for note in result.report.data["notes"])
    narrow = tuple(DEAD if size == UNITS else size for size in state)
    wide = streamed(content, shapes["x"], state)
    for a, b in zip(wide, streamed(result.to_bytes(), shapes["x"], narrow), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_without_the_option_the_state_stays_and_the_option_is_named(case: str) -> None:
    found = onnxgrail.inspect(to_bytes(CASES[case]()[0]))
    assert STATE in [refusal.reason for refusal in found.refusals]
    assert not found.blocks


def test_states_in_another_order_stay() -> None:
    """The next step would read its units at other positions."""
    body = DIRECT.replace("s, next =", "s, turned =") + "next = Gather<axis=2>(turned, order)\n"
    weights = {"w": (1, 48, 6), "r": (1, 48, UNITS), "b": (1, 96), "second": ints(1), "v": (UNITS, 4)}
    model = tiny(
        f"float[S,N,6] x, float[1,N,{UNITS}] state => float[] y, float[] next",
        body,
        {**weights, "order": np.arange(UNITS)[::-1].copy()},
    )
    assert not onnxgrail.inspect(to_bytes(model), kv_io=True).blocks
