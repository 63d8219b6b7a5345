"""The ways over a device, taken on the CPU: what they give must be what arrays of the host give."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import onnxgrail
from onnxgrail.calibration.devices import values
from onnxgrail.calibration.devices.lanes import HOST, Lane
from onnxgrail.calibration.devices.values import ValueLane
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.runtime.session import CPU, open_session
from onnxgrail.calibration.stream import stream as module
from onnxgrail.calibration.stream.cache import Cache
from onnxgrail.calibration.stream.stream import Stream
from onnxgrail.core import Array, Probe
from onnxgrail.errors import ModelError
from onnxgrail.graph.rewrite import weights
from onnxgrail.machine.device import Device
from onnxgrail.narrowing.order import closed_steps
from tests.e2e import nets
from tests.e2e.test_formats import halved
from tests.oracle import prepared_of, run
from tests.unit.test_stream import every_model, half, surveyed
from tests.unit.ways import Values, Way, every_way


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


FLOATING = {"y", "half", "double", "picked", "sum"}


@every_way
@pytest.mark.parametrize("rows", [5, 0])
@pytest.mark.parametrize("there", [False, True], ids=["from the host", "from the device"])
def test_a_bound_run_gives_what_a_run_gives(way: Way, rows: int, there: bool) -> None:
    x = np.random.default_rng(0).standard_normal((2 * rows, 3)).astype(np.float32)[::2]
    feed: dict[str, Any] = {"x": x, "least": np.array(0.1, np.float32), "some": np.arange(rows)[:, None] % 2 == 0}
    lane = way.lane()
    with open_session(mixed()) as session:
        wanted = session.run(feed)
        if there:
            feed |= {name: way.there(feed[name]) for name in ("x", "least")}
        found: dict[str, Any] = lane.run(session, feed)
        again = lane.run(session, feed | {"least": np.array(9, np.float32)})
        del again
    gc.collect()
    junk = [np.full(15, np.nan, np.float32) for _ in range(1000)]  # takes the memory if it was given back
    away = {name for name, array in found.items() if way.is_there(array)}
    assert away == FLOATING or (rows == 0 and away <= FLOATING)  # where there is no number, there is none to move
    for name, array in wanted.items():
        got = lane.host(found[name])
        assert isinstance(got, np.ndarray)
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(got, array)
    assert len(junk) == 1000


@every_way
def test_an_input_that_is_an_output_stays_the_callers(way: Way) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N"])
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y, x])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for outputs in (["x", "y"], ["x"]):
        with open_session(model.SerializeToString(), outputs=outputs) as session:
            found = way.lane().run(session, {"x": way.there(np.ones(10000, np.float32))})
        gc.collect()
        junk = [np.full(10000, np.nan, np.float32) for _ in range(20)]
        assert set(found) == set(outputs)
        assert (way.lane().host(found["x"]) == 1).all()
        assert len(junk) == 20


@every_way
def test_a_tensor_that_is_no_plain_one_takes_the_usual_way(way: Way) -> None:
    nodes = [helper.make_node("SequenceConstruct", ["x", "x"], ["both"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    both = helper.make_tensor_sequence_value_info("both", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph(nodes, "g", [x], [both]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    with open_session(model.SerializeToString()) as session:
        found: Any = way.lane().run(session, {"x": way.there(np.ones(2, np.float32))})
    assert [one.tolist() for one in found["both"]] == [[1.0, 1.0]] * 2


@every_way
def test_a_feed_that_does_not_fit_is_explained(way: Way) -> None:
    with open_session(mixed()) as session, pytest.raises(ModelError, match=r"no value for input 'x'"):
        way.lane().run(session, {"least": np.array(0, np.float32)})


@every_way
def test_activations_stay_on_the_device_while_there_is_room(way: Way) -> None:
    feeds = [{"x": np.full(100, n, np.float32)} for n in range(4)]
    cache = Cache(feeds, budget=1600, lane=way.lane(room=800))
    for number in range(4):
        cache.add(number, {"y": way.there(np.full(100, number, np.float32))})
    assert [way.is_there(batch["y"]) for batch in cache] == [True, True, False, False]
    assert [float(way.lane().host(batch["y"])[0]) for batch in cache] == [0, 1, 2, 3]
    assert cache.held == 4 * 400 + 2 * 400
    cache.trim(0, ["x"])
    cache.add(2, {"z": way.there(np.ones(100, np.float32))})
    assert [sorted(n for n, a in batch.items() if way.is_there(a)) for batch in cache] == [[], ["y"], ["z"], []]
    cache.keep(["x"])
    assert (cache.held, cache._away) == (1600, 0)


def streams(name: str, *lanes: Lane) -> list[Stream]:
    model, survey, feeds = surveyed(name)
    makers = tuple(lambda one=one: one for one in feeds)  # type: ignore[misc]
    batches = Batches(feeds=makers, samples=len(feeds), source="test")
    return [Stream(prepared_of(model, survey, batches), providers=CPU, lane=lane) for lane in lanes]


@every_way
@every_model
@pytest.mark.parametrize("room", [0, 2**30], ids=["kept on the host", "kept on the device"])
def test_the_stream_measures_the_same_on_either_way(way: Way, name: str, room: int) -> None:
    model, survey, _ = surveyed(name)
    ledger, folded = weights.empty(survey), None
    with_host, with_device = streams(name, HOST, way.lane(room))
    for number, step in enumerate(closed_steps(survey.blocks)):
        (block,) = step.blocks
        found = [s.measure(block.probes, ledger, lambda: None, step.limit)[0] for s in (with_host, with_device)]
        same(*found)
        after = half(survey, number, ledger)
        kept = np.arange(1, block.units, 2)
        if folded is None:
            folded = [s.measure_fold(block.probes, kept, ledger, after)[0] for s in (with_host, with_device)]
            same(*folded)
        ledger = after
    output = model.graph.outputs[0].name or ""
    for one, other in zip(with_host.record([output], ledger), with_device.record([output], ledger), strict=True):
        assert isinstance(other[output], np.ndarray)
        np.testing.assert_allclose(other[output], one[output], rtol=0, atol=1e-5)


@every_model
def test_without_torch_only_sums_come_to_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, survey, _ = surveyed(name)
    brought: list[tuple[int, ...]] = []
    copied = values._copied

    def watched(value: Any) -> Array:
        brought.append(tuple(value.shape()))
        return copied(value)

    monkeypatch.setattr(values, "_copied", watched)
    (stream,) = streams(name, ValueLane(room=2**30))
    ledger = weights.empty(survey)
    widths = set()
    for number, step in enumerate(closed_steps(survey.blocks)):
        (block,) = step.blocks
        stream.measure(block.probes, ledger, lambda: None, step.limit)
        widths |= {probe.width for probe in block.probes}
        ledger = half(survey, number, ledger)
    assert stream.position > 0  # something was kept for the next step
    assert set(brought) == {shape for width in widths for shape in ((1, width), (width, width))}


def test_what_is_kept_outlives_the_session_that_made_it() -> None:
    lane = ValueLane(room=2**30)
    with open_session(mixed()) as session:
        feed = {"x": np.ones((4, 3), np.float32), "least": np.array(0, np.float32), "some": np.ones((4, 1), bool)}
        made: Any = lane.run(session, feed)["y"]
        kept: Any = lane.kept(made, 2**30)
    assert kept.value.data_ptr() != made.value.data_ptr()
    assert isinstance(lane.kept(made, 47), np.ndarray)  # there is no room for 48 bytes
    del made
    gc.collect()
    assert (lane.host(kept) == 1).all()


def test_activations_of_one_layout_share_a_session() -> None:
    lane, x = ValueLane(), np.ones((3, 5, 9), np.float32)
    for width in (4, 6):
        probe = Probe(value="x", axis=2, index=np.arange(width)[:, None] + 1, pooled=False)
        lane.sums(probe).add(x, probe)
    assert len(lane._kernels._sessions) == 1
    lane.sums(probe).add(x, probe, np.arange(15) % 2 == 0)
    assert len(lane._kernels._sessions) == 2


def test_squares_take_no_products() -> None:
    lane, x = ValueLane(), np.ones((3, 5), np.float32)
    probe = Probe(value="x", axis=1, index=np.arange(5)[:, None], pooled=False, alone=True)
    lane.sums(probe).add(x, probe)
    (session,) = lane._kernels._sessions.values()
    assert set(session.output_names) == {"total", "squares"}


def same(a: Any, b: Any) -> None:
    assert a.count == b.count
    assert np.array_equal(b.gram, b.gram.T)
    np.testing.assert_allclose(b.gram, a.gram, rtol=0, atol=1e-5 * np.abs(a.gram).max())
    np.testing.assert_allclose(b.total, a.total, rtol=0, atol=1e-5 * max(1.0, np.abs(a.total).max()))


NETS = {
    "mlp": (nets.mlp, lambda: nets.vectors(80)),
    "convnet": (nets.convnet, lambda: nets.images(28)),
    "padded transformer": (nets.transformer, lambda: nets.tokens(24, padded=True)),
    "half mlp": (lambda: nets.mlp(dtype=np.float16), lambda: nets.vectors(80, dtype=np.float16)),
    "bfloat16 mlp": (lambda: ir.to_proto(halved(ir.from_proto(nets.mlp()), "bf16")), lambda: nets.vectors(80)),
}
CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "grail": {"selector": "obs", "compensate": "grail"},
    "fold": {"reducer": "fold", "compensate": "grail"},
}


@every_way
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_a_whole_run_comes_out_the_same(
    way: Way, name: str, choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, draw = NETS[name]
    model, data = make(), draw()
    opened: list[Any] = []
    common = {"data": data, "unit_ratio": 0.4, "round_to": 1, "check": False, **choices}
    plain = onnxgrail.compress(model, **common)
    monkeypatch.setattr(module, "lane_of", lambda providers: opened.append(way.lane()) or opened[-1])
    with solving(way):
        other = onnxgrail.compress(model, **common)
    assert opened
    assert [b["kept"] for b in plain.report.data["blocks"]] == [b["kept"] for b in other.report.data["blocks"]]
    a, b = (run(result.model, data) for result in (plain, other))
    limit = 1e-3 if model.graph.initializer[0].data_type == TensorProto.FLOAT else 2e-2
    for output, array in a.items():
        assert np.abs(array - b[output]).max() <= limit * np.abs(array).max()


def solving(way: Way) -> contextlib.AbstractContextManager[None]:
    """Matrices are solved by torch where that adds up, too."""
    if isinstance(way, Values):
        return contextlib.nullcontext()
    from onnxgrail.algebra.solve import linear
    from onnxgrail.calibration.devices.solver import TensorLinear

    return linear.using(TensorLinear(Device(), side=2))
