"""The fits of `best`: where consumers stand in a graph, the rows that make their outputs, and biases that move."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.calibration.stream import rows
from onnxgrail.core import Array
from onnxgrail.graph.fittable.consumers import Consumer, consumers, downstream
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.trace.survey import Ledger
from tests.oracle import run, survey_of
from tests.tiny import feed, tiny

CONV = ("float[N,3,6,5] x => float[] y", {"w1": (8, 3, 1, 1)})
ROWS = ("float[N,6] x => float[] y", {"w1": (6, 8)})


def last(model: ir.Model) -> Consumer:
    """The consumer of a model's one block: of its layers the last."""
    return consumers(model, survey_of(model, feed(model)))[-1]


@pytest.mark.parametrize(("bias", "known"), [("b", [2.0] * 6), ("x", None)])
def test_a_bias_inside_is_known_or_the_layer_is_left_out(bias: str, known: list[float] | None) -> None:
    signature, weights = ROWS
    body = f"h = MatMul(x, w1)\nr = Relu(h)\ny = Gemm(r, w2, {bias})"
    model = tiny(signature, body, {**weights, "w2": (8, 6), **({"b": np.float32([2])} if bias == "b" else {})})
    found = [c for c in consumers(model, survey_of(model, feed(model))) if c.output == "y"]
    assert [list(c.bias) for c in found] == ([] if known is None else [known])


def tensors(model: ir.Model, *names: str) -> list[Array]:
    """Intermediate tensors of a run."""
    more = model.clone()
    values = {v.name: v for n in more.graph for v in n.outputs}
    have = {o.name for o in more.graph.outputs}
    more.graph.outputs.extend(values[n] for n in names if n not in have)
    found = run(more, feed(model))
    return [found[n] for n in names]


@pytest.mark.parametrize(
    ("attributes", "kernel"),
    [
        ("", (1, 1)),
        ("pads=[1,1,1,1]", (3, 3)),
        ("pads=[0,2,1,0], strides=[2,1]", (3, 2)),
        ("pads=[2,2,2,2], dilations=[2,2]", (3, 3)),
        ("strides=[2,2]", (1, 1)),
    ],
)
def test_patches_times_weights_are_the_convolution(attributes: str, kernel: tuple[int, int]) -> None:
    signature, weights = CONV
    body = (
        f"h = Conv(x, w1)\nr = Relu(h)\ny = Conv<{attributes}>(r, w2, b2)"
        if attributes
        else ("h = Conv(x, w1)\nr = Relu(h)\ny = Conv(r, w2, b2)")
    )
    model = tiny(signature, body, {**weights, "w2": (4, 8, *kernel), "b2": (4,)})
    consumer = last(model)
    r, y = tensors(model, "r", "y")
    where = rows.positions(y.shape, consumer.made, 50, np.random.default_rng(0))
    assert len(rows.numbers(where, y.shape, consumer.made)) == min(50, y.size // 4)
    weight = model.graph.initializers["w2"].const_value.numpy()  # type: ignore[union-attr]
    assert consumer.window is not None
    found = rows.patches(r, consumer.window, y.shape, where) @ weight.reshape(4, -1).T + consumer.bias
    np.testing.assert_allclose(found, rows.outputs(y, consumer.made, where), atol=1e-5)


@pytest.mark.parametrize(
    ("tail", "weights", "bias", "total"),
    [
        ("y = MatMul(r, w2)", {"w2": (8, 6)}, False, ""),
        ("o = MatMul(r, w2)\ny = Add(o, b)", {"w2": (8, 6), "b": (6,)}, False, ""),
        ("o = MatMul(r, w2)\np = Add(b, o)\ny = Add(p, x)", {"w2": (8, 6), "b": (6,)}, True, "y"),
        ("o = MatMul(r, w2)\ny = Add(x, o)", {"w2": (8, 6)}, False, "y"),
        ("o = Gemm(r, w2, b)\ny = Add(o, x)", {"w2": (8, 6), "b": (6,)}, True, "y"),
        ("y = Gemm<transB=1>(r, w2, b)", {"w2": (6, 8), "b": (6,)}, True, ""),
        ("o = MatMul(r, w2)\ns = Relu(o)\ny = Add(s, x)", {"w2": (8, 6)}, False, ""),
    ],
)
def test_biases_and_residuals(tail: str, weights: dict[str, tuple[int, ...]], total: str, *, bias: bool) -> None:
    signature, first = ROWS
    model = tiny(signature, f"h = MatMul(x, w1)\nr = Relu(h)\n{tail}", {**first, **weights})
    consumer = last(model)
    assert (consumer.source, consumer.total) == ("r", total)
    assert consumer.residual == ("x" if total else "")
    assert bool(consumer.bias.any()) == bias


def test_a_weight_that_two_nodes_read_is_left_out() -> None:
    signature, first = ROWS
    body = "h = MatMul(x, w1)\nr = Relu(h)\ns = Tanh(h)\na = MatMul(r, w2)\nb = MatMul(s, w2)\ny = Add(a, b)"
    model = tiny(signature, body, {**first, "w2": (8, 6)})
    assert [c.value for c in consumers(model, survey_of(model, feed(model)))] == ["w1"]


def test_layers_that_lose_nothing_are_there_too() -> None:
    """Those with a weight that nothing else reads, in node order; `t` is read twice."""
    signature, first = ROWS
    body = "h = MatMul(x, w1)\nr = Relu(h)\no = MatMul(r, w2)\n"
    body += "p = MatMul(o, t)\nq = MatMul(p, t)\ns = MatMul(q, v)\ny = Add(s, o)"
    model = tiny(signature, body, {**first, "v": (6, 6), "w2": (8, 6), "t": (6, 6)})
    survey = survey_of(model, feed(model))
    assert [c.value for c in consumers(model, survey)] == ["w1", "w2", "v"]
    assert not survey.operands["s", 1].units
    assert downstream(model, ["r"]) == {"r", "o", "p", "q", "s", "y"}
    ledger = Ledger(dead=np.zeros(survey.ids, dtype=bool), arrays={"v": np.eye(6, dtype=np.float32)})
    moved = model.clone()
    apply(moved.graph, survey, ledger)
    np.testing.assert_array_equal(moved.graph.initializers["v"].const_value.numpy(), np.eye(6))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("tail", "weights", "added"),
    [
        ("y = MatMul(r, w2)", {"w2": (8, 6)}, True),
        ("o = MatMul(r, w2)\ny = Add(o, b)", {"w2": (8, 6), "b": (6,)}, False),
        ("o = MatMul(r, w2)\nt = Tanh(o)\nu = Relu(o)\ny = Add(t, u)", {"w2": (8, 6)}, True),
        ("y = Gemm(r, w2, b)", {"w2": (8, 6), "b": (6,)}, False),
        ("y = Gemm(r, w2)", {"w2": (8, 6)}, False),
    ],
)
def test_shifts_reach_the_output(tail: str, weights: dict[str, tuple[int, ...]], *, added: bool) -> None:
    signature, first = ROWS
    model = tiny(signature, f"h = MatMul(x, w1)\nr = Relu(h)\n{tail}", {**first, **weights})
    survey = survey_of(model, feed(model))
    consumer = consumers(model, survey)[-1]
    ledger = Ledger(dead=np.zeros(survey.ids, dtype=bool), arrays={})
    shift = np.arange(6.0)
    moved = model.clone()
    apply(moved.graph, survey, dataclasses.replace(ledger, shifts={consumer.node: shift}))
    assert (len(moved.graph) > len(model.graph)) == added
    (plain,) = tensors(model, consumer.output)
    (found,) = tensors(moved, consumer.output)
    after = len(moved.graph) == len(model.graph) and "MatMul" in tail
    np.testing.assert_allclose(found, plain if after else plain + shift, atol=1e-5)
    if "Tanh" not in tail:
        np.testing.assert_allclose(run(moved, feed(model))["y"], run(model, feed(model))["y"] + shift, atol=1e-5)


def test_a_convolution_gets_a_bias_for_what_stays() -> None:
    signature, weights = CONV
    model = tiny(signature, "h = Conv(x, w1)\nr = Relu(h)\ny = Conv(r, w2)", {**weights, "w2": (4, 8, 1, 1)})
    survey = survey_of(model, feed(model))
    dead = np.isin(np.arange(survey.ids), survey.blocks[0].ids[:2])
    slim, moved = model.clone(), model.clone()
    apply(slim.graph, survey, Ledger(dead=dead, arrays={}))
    shift = np.arange(8.0)  # of the producer: two of its outputs are gone
    apply(moved.graph, survey, Ledger(dead=dead, arrays={}, shifts={"h": shift}))
    (plain,), (found,) = tensors(slim, "h"), tensors(moved, "h")
    np.testing.assert_allclose(found, plain + shift[2:].reshape(-1, 1, 1), atol=1e-5)
