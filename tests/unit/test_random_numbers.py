"""Random nodes draw the same numbers in every run here, of the distribution that the model asks for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.core import Array
from onnxgrail.graph.io.running.steady import random_ops
from onnxgrail.graph.io.serial import pack, runs_as_is, to_bytes, to_file
from tests.tiny import tiny

SIZE = 200
NODES = {
    "RandomNormal<shape = [200, 200], mean = 2.0, scale = 0.5>()": (2.0, 0.5),
    "RandomNormalLike<mean = -1.0>(x)": (-1.0, 1.0),
    "RandomUniform<shape = [200, 200], low = -1.0, high = 3.0>()": (1.0, 4 / 12**0.5),
    "RandomUniformLike(x)": (0.5, 1 / 12**0.5),
}


def of(node: str, opset: int = 20, kind: str = "float") -> ir.Model:
    return tiny(f"{kind}[N,{SIZE}] x => {kind}[N,{SIZE}] y", f"n = {node}\ny = Add(x, n)", {}, opset=opset)


def drawn(model: ir.Model, x: Array) -> Array:
    with open_session(pack(model)) as session:
        first, second = (session.run({"x": x})["y"] for _ in range(2))
    assert np.array_equal(first, second)
    return first - x


@pytest.mark.parametrize("node", NODES)
def test_numbers_are_the_same_in_every_run_and_of_the_distribution(node: str) -> None:
    x = np.zeros((SIZE, SIZE), dtype=np.float32)
    found = drawn(of(node), x)
    mean, spread = NODES[node]
    assert found.mean() == pytest.approx(mean, abs=4 * spread / SIZE)
    assert found.std() == pytest.approx(spread, rel=0.02)
    for one, other in ((found[:-1], found[1:]), (found[:, :-1], found[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.03  # neighbors are independent
    assert len(np.unique(found)) > 0.99 * found.size
    assert np.array_equal(found, drawn(of(node), x))  # also in another session


def test_chances_of_a_bernoulli_node_are_kept() -> None:
    x = np.broadcast_to(np.linspace(0, 1, SIZE, dtype=np.float32), (1000, SIZE)).copy()
    found = drawn(of("Bernoulli(x)"), x)
    assert np.minimum(np.abs(found), np.abs(found - 1)).max() < 1e-6
    assert np.abs(found.mean(axis=0) - x[0]).max() < 0.08


def test_two_nodes_of_a_model_draw_different_numbers() -> None:
    body = "a = RandomNormalLike(x)\nb = RandomNormalLike(x)\ny = Sub(a, b)"
    found = drawn(tiny(f"float[N,{SIZE}] x => float[N,{SIZE}] y", body, {}), np.zeros((SIZE, SIZE), np.float32))
    assert found.std() == pytest.approx(2**0.5, rel=0.02)


def test_nodes_in_branches_draw_the_same_numbers_too() -> None:
    body = """
        yes = ReduceMax<keepdims = 0>(x)
        on = Cast<to = 9>(yes)
        n = If (on) <
            then_branch = one () => (float[N,200] a) { a = RandomNormalLike(x) },
            else_branch = two () => (float[N,200] b) { b = Identity(x) }
        >
        y = Add(x, n)"""
    model = tiny(f"float[N,{SIZE}] x => float[N,{SIZE}] y", body, {}, recorded=False)
    assert random_ops(model) == ["RandomNormalLike"]
    assert drawn(model, np.ones((4, SIZE), np.float32)).std() == pytest.approx(1.0, rel=0.1)


def test_half_precision_keeps_its_type() -> None:
    assert drawn(of("RandomNormalLike(x)", kind="float16"), np.zeros((4, SIZE), np.float16)).dtype == np.float16


@pytest.mark.parametrize(("node", "stays"), [("RandomNormalLike(x)", True), ("RandomNormalLike<dtype = 1>(x)", False)])
def test_a_node_of_unknown_type_stays(node: str, *, stays: bool) -> None:
    assert (b"RandomNormalLike" in to_bytes(of(node, 14))) == stays  # before CastLike


def test_files_keep_their_random_nodes() -> None:
    model = of("RandomNormalLike(x)")
    assert [node.op_type for node in to_file(model).graph.node] == ["RandomNormalLike", "Add"]
    assert b"RandomNormalLike" in to_bytes(model, run=False)
    assert not runs_as_is(model)
    assert runs_as_is(tiny("float[N,4] x => float[N,4] y", "y = Relu(x)", {}))


@pytest.mark.parametrize(("opset", "kind", "given"), [(9, "int32", ""), (20, "int64", ", dtype = 7")])
def test_classes_are_drawn_by_their_chances(opset: int, kind: str, given: str) -> None:
    body = f"y = Multinomial<sample_size = 500{given}>(x)"
    model = tiny(f"float[N,4] x => {kind}[N,500] y", body, {}, opset=opset, ir_version=8)
    chances = np.array([[0.1, 0.2, 0.3, 0.4], [0.97, 0.01, 0.01, 0.01]])
    x = np.log(np.tile(chances, (20, 1)) * 7).astype(np.float32)  # the sum does not matter
    with open_session(pack(model)) as session:
        first, second = (session.run({"x": x})["y"] for _ in range(2))
    assert np.array_equal(first, second)
    assert (first.shape, first.dtype) == ((40, 500), np.dtype(kind))
    for row, want in enumerate(chances):
        assert np.bincount(first[row::2].ravel(), minlength=4) / 10_000 == pytest.approx(want, abs=0.02)
    assert not np.array_equal(first[0], first[2])  # samples draw apart


def test_a_small_change_of_the_chances_draws_mostly_the_same_classes() -> None:
    model = tiny("float[N,4] x => int32[N,500] y", "y = Multinomial<sample_size = 500>(x)", {})
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    with open_session(pack(model)) as session:
        first, second = (session.run({"x": one})["y"] for one in (x, x + 0.01 * x[::-1]))
    assert 0.98 < (first == second).mean() < 1
