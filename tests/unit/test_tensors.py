"""The way over a device, taken on the CPU: what it gives must be what arrays of the host give."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import onnxgrail
from onnxgrail.algebra import linear
from onnxgrail.algebra.gram import Sums
from onnxgrail.calibration import lanes
from onnxgrail.calibration import stream as module
from onnxgrail.calibration.cache import Cache
from onnxgrail.calibration.data import Batches
from onnxgrail.calibration.lanes import HOST, Lane
from onnxgrail.calibration.session import CPU, open_session
from onnxgrail.calibration.stream import Stream
from onnxgrail.core import Array, Probe
from onnxgrail.device import Device
from onnxgrail.errors import DataError, ModelError
from onnxgrail.graph import weights
from onnxgrail.order import steps
from tests.e2e import nets
from tests.oracle import run
from tests.unit.test_gram import LAYOUTS
from tests.unit.test_stream import every_model, half, surveyed

torch = pytest.importorskip("torch")


def lane(room: int = 2**30) -> Lane:
    from onnxgrail.calibration.tensors import TensorLane

    return TensorLane(Device(memory=room))


def mixed() -> bytes:
    """Every kind of output, from inputs of several kinds."""

    def info(name: str, kind: int, shape: list[Any]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    nodes = [
        helper.make_node("Mul", ["x", "x"], ["y"]),
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["x"], ["double"], to=TensorProto.DOUBLE),
        helper.make_node("Greater", ["x", "least"], ["flags"]),
        helper.make_node("Where", ["some", "x", "least"], ["picked"]),
        helper.make_node("Shape", ["x"], ["size"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
    ]
    inputs = [
        ("x", TensorProto.FLOAT, ["N", 3]),
        ("least", TensorProto.FLOAT, []),
        ("some", TensorProto.BOOL, ["N", 1]),
    ]
    outputs = [
        ("y", TensorProto.FLOAT, ["N", 3]),
        ("half", TensorProto.FLOAT16, ["N", 3]),
        ("double", TensorProto.DOUBLE, ["N", 3]),
        ("flags", TensorProto.BOOL, ["N", 3]),
        ("picked", TensorProto.FLOAT, ["N", 3]),
        ("size", TensorProto.INT64, [2]),
        ("sum", TensorProto.FLOAT, []),
    ]
    graph = helper.make_graph(nodes, "mixed", [info(*i) for i in inputs], [info(*o) for o in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


@pytest.mark.parametrize("rows", [5, 0])
@pytest.mark.parametrize("there", [False, True], ids=["arrays", "tensors"])
def test_a_bound_run_gives_what_a_run_gives(rows: int, there: bool) -> None:
    x = np.random.default_rng(0).standard_normal((2 * rows, 3)).astype(np.float32)[::2]
    feed: dict[str, Any] = {"x": x, "least": np.array(0.1, np.float32), "some": np.arange(rows)[:, None] % 2 == 0}
    way = lane()
    with open_session(mixed()) as session:
        wanted = session.run(feed)
        if there:
            feed |= {name: torch.tensor(feed[name]) for name in ("x", "least")}
        found: dict[str, Any] = way.run(session, feed)
        again = way.run(session, feed | {"least": np.array(9, np.float32)})
        del again
    gc.collect()
    junk = [np.full(15, np.nan, np.float32) for _ in range(1000)]  # takes the memory if it was given back
    assert {name for name, array in found.items() if torch.is_tensor(array)} == {
        *"y",
        "half",
        "double",
        "picked",
        "sum",
    }
    for name, array in wanted.items():
        got = way.host(found[name])
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(got, array)
    assert len(junk) == 1000


def test_an_input_that_is_an_output_stays_the_callers() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N"])
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y, x])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for outputs in (["x", "y"], ["x"]):
        with open_session(model.SerializeToString(), outputs=outputs) as session:
            found = lane().run(session, {"x": torch.ones(10000)})  # type: ignore[dict-item]
        gc.collect()
        junk = [np.full(10000, np.nan, np.float32) for _ in range(20)]
        assert set(found) == set(outputs)
        assert (lane().host(found["x"]) == 1).all()
        assert len(junk) == 20


def test_a_tensor_that_is_no_plain_one_takes_the_usual_way() -> None:
    nodes = [helper.make_node("SequenceConstruct", ["x", "x"], ["both"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    both = helper.make_tensor_sequence_value_info("both", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [both]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    with open_session(model.SerializeToString()) as session:
        found: Any = lane().run(session, {"x": torch.ones(2)})  # type: ignore[dict-item]
    assert [one.tolist() for one in found["both"]] == [[1.0, 1.0]] * 2


def test_a_feed_that_does_not_fit_is_explained() -> None:
    with open_session(mixed()) as session, pytest.raises(ModelError, match=r"no value for input 'x'"):
        lane().run(session, {"least": np.array(0, np.float32)})


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_sums_are_those_of_the_host(name: str, dtype: Any, masked: bool) -> None:
    shape, probe = LAYOUTS[name]
    rng = np.random.default_rng(1)
    rows = rng.random([s for axis, s in enumerate(shape) if axis != probe.axis]) < 0.6 if masked else None
    found = []
    for way in (HOST, lane()):
        total, part = way.sums(probe), way.sums(probe)
        for seed in range(3):
            x = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
            part.add(x if way is HOST else torch.tensor(x), probe, rows)
            if seed != 1:
                total.take(part)
        found.append(total.drain())
        assert total.drain()[2] == 0
    (half, sums, count), (other, others, number) = found
    assert count == number > 0
    np.testing.assert_allclose(other, half, rtol=0, atol=1e-5 * np.abs(half).max())
    np.testing.assert_allclose(others, sums, rtol=0, atol=1e-5 * count)
    assert not np.triu(other, 1).any()


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_squares_neither_vanish_nor_overflow(scale: float) -> None:
    x = (np.random.default_rng(0).standard_normal((9, 4)) * scale).astype(np.float32)
    probe = Probe(value="x", axis=1, index=np.arange(4)[:, None], pooled=False)
    found = []
    for way in (HOST, lane()):
        total = way.sums(probe)
        total.take(_with(way.sums(probe), x, probe))
        found.append(total.drain()[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)
    assert found[0].any()


def _with(sums: Any, x: Array, probe: Probe) -> Any:
    sums.add(x, probe)
    return sums


def test_what_cannot_be_summed_is_refused_in_the_same_words() -> None:
    probe = Probe(value="x", axis=1, index=np.arange(2)[:, None], pooled=False)
    bad = np.array([[1.0, np.nan], [np.inf, 2.0]], np.float32)
    words = []
    for sums in (Sums(probe), lane().sums(probe)):
        with pytest.raises(DataError) as error:
            sums.add(bad, probe)
        words.append(str(error.value))
        with pytest.raises(DataError, match="3 entries"):
            sums.add(np.ones((2, 2), np.float32), probe, np.ones(3, bool))
    assert words[0] == words[1]
    assert "2 of 4 values" in words[0]


def test_activations_stay_on_the_device_while_there_is_room() -> None:
    feeds = [{"x": np.full(100, n, np.float32)} for n in range(4)]
    cache = Cache(feeds, budget=1600, lane=lane(room=800))
    for number in range(4):
        cache.add(number, {"y": torch.full((100,), float(number))})  # type: ignore[dict-item]
    assert [torch.is_tensor(batch["y"]) for batch in cache] == [True, True, False, False]
    assert [float(batch["y"][0]) for batch in cache] == [0, 1, 2, 3]
    assert cache.held == 4 * 400 + 2 * 400
    cache.trim(0, ["x"])
    cache.add(2, {"z": torch.ones(100)})  # type: ignore[dict-item]
    assert [sorted(n for n, a in batch.items() if torch.is_tensor(a)) for batch in cache] == [[], ["y"], ["z"], []]
    cache.keep(["x"])
    assert (cache.held, cache._away) == (1600, 0)


def streams(name: str, *ways: Lane) -> list[Stream]:
    model, survey, feeds = surveyed(name)
    makers = tuple(lambda one=one: one for one in feeds)  # type: ignore[misc]
    batches = Batches(feeds=makers, samples=len(feeds), source="test")
    return [Stream(model, survey, batches, providers=CPU, lane=way) for way in ways]


@every_model
@pytest.mark.parametrize("room", [0, 2**30], ids=["kept on the host", "kept on the device"])
def test_the_stream_measures_the_same_on_either_way(name: str, room: int) -> None:
    model, survey, _ = surveyed(name)
    ledger, folded = weights.empty(survey), None
    with_host, with_tensors = streams(name, HOST, lane(room))
    for number, step in enumerate(steps(survey.blocks, closed_loop=True)):
        (block,) = step.blocks
        found = [s.measure(block.probes, ledger, lambda: None, step.limit)[0] for s in (with_host, with_tensors)]
        same(*found)
        after = half(survey, number, ledger)
        kept = np.arange(1, block.units, 2)
        if folded is None:
            folded = [s.measure_fold(block.probes, kept, ledger, after)[0] for s in (with_host, with_tensors)]
            same(*folded)
        ledger = after
    output = model.graph.outputs[0].name or ""
    for one, other in zip(with_host.record([output], ledger), with_tensors.record([output], ledger), strict=True):
        assert isinstance(other[output], np.ndarray)
        np.testing.assert_allclose(other[output], one[output], rtol=0, atol=1e-5)


def same(a: Any, b: Any) -> None:
    assert a.count == b.count
    assert np.array_equal(b.gram, b.gram.T)
    np.testing.assert_allclose(b.gram, a.gram, rtol=0, atol=1e-5 * np.abs(a.gram).max())
    np.testing.assert_allclose(b.total, a.total, rtol=0, atol=1e-5 * max(1.0, np.abs(a.total).max()))


def test_large_matrices_are_solved_there() -> None:
    from onnxgrail.calibration.solver import TensorLinear

    rng = np.random.default_rng(0)
    half = rng.standard_normal((40, 30))
    matrix, rhs, device = half.T @ half, rng.standard_normal((30, 7)), TensorLinear(Device(), side=1)
    np.testing.assert_allclose(device.product(half, matrix), half @ matrix, rtol=1e-12)
    np.testing.assert_allclose(device.inverse(matrix), np.linalg.inv(matrix), rtol=1e-7, atol=1e-9)
    factor, wanted = device.cholesky(matrix.copy()), linear.HOST.cholesky(matrix.copy())
    np.testing.assert_allclose(factor.diagonal, wanted.diagonal, rtol=1e-12)
    np.testing.assert_allclose(factor.solve(rhs), wanted.solve(rhs), rtol=1e-9)
    np.testing.assert_allclose(factor.solve(rhs[:, 0]), wanted.solve(rhs[:, 0]), rtol=1e-9)
    for bad in (-np.eye(3), np.full((3, 3), np.nan)):
        with pytest.raises(np.linalg.LinAlgError):
            device.inverse(bad)
    with pytest.raises(np.linalg.LinAlgError):
        device.cholesky(-np.eye(3))


def test_a_full_device_leaves_it_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxgrail.calibration.solver import TensorLinear

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    matrix, device = 2.0 * np.eye(3), TensorLinear(Device(), side=1)
    factor = device.cholesky(matrix.copy())
    monkeypatch.setattr(TensorLinear, "_there", full)
    rhs = np.arange(6.0).reshape(3, 2)
    np.testing.assert_allclose(factor.solve(rhs), rhs / 2)
    np.testing.assert_allclose(device.cholesky(matrix.copy()).solve(rhs), rhs / 2)
    np.testing.assert_allclose(device.inverse(matrix), np.eye(3) / 2)
    np.testing.assert_allclose(device.product(matrix, rhs), 2 * rhs)


NETS = {
    "mlp": (nets.mlp, lambda: nets.vectors(80)),
    "convnet": (nets.convnet, lambda: nets.images(24)),
    "padded transformer": (nets.transformer, lambda: nets.tokens(24, padded=True)),
    "half mlp": (lambda: nets.mlp(dtype=np.float16), lambda: nets.vectors(80, dtype=np.float16)),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("choices", [{}, {"selector": "obs", "compensate": "grail"}], ids=["default", "grail"])
def test_a_whole_run_comes_out_the_same(name: str, choices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxgrail.calibration.solver import TensorLinear

    make, draw = NETS[name]
    model, data = make(), draw()
    opened: list[Any] = []
    common = {"data": data, "ratio": 0.4, "round_to": 1, "check": False, **choices}
    plain = onnxgrail.compress(model, **common)
    monkeypatch.setattr(module, "lane_of", lambda providers: opened.append(lane()) or opened[-1])
    with linear.using(TensorLinear(Device(), side=2)):
        other = onnxgrail.compress(model, **common)
    assert opened
    assert [b["kept"] for b in plain.report.data["blocks"]] == [b["kept"] for b in other.report.data["blocks"]]
    a, b = (run(nets.to_bytes(result.model), data) for result in (plain, other))
    limit = 2e-2 if name.startswith("half") else 1e-3
    for output, array in a.items():
        assert np.abs(array - b[output]).max() <= limit * np.abs(array).max()


def test_solving_goes_where_models_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxgrail.calibration import solver

    with lanes.solving_on(CPU):
        assert linear.linear() is linear.HOST
    monkeypatch.setattr(lanes, "why_host", lambda providers: "")
    with lanes.solving_on(("CUDAExecutionProvider:1",)):
        assert isinstance(linear.linear(), solver.TensorLinear)
        assert linear.linear()._device.place == "cuda:1"
    assert linear.linear() is linear.HOST


def test_exact_products_stay_exact_where_a_program_wants_fast_ones() -> None:
    from onnxgrail.calibration.tensors import _ieee

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with _ieee():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
