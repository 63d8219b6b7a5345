"""The latency model is exact at full widths, grows with every width, and can be stored; kernels find their nodes."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.calibration.prepare import prepare
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime import profile
from onnxgrail.calibration.runtime.profile import Kernel, kernels_in
from onnxgrail.calibration.runtime.timing import Times
from onnxgrail.core import Recipe
from onnxgrail.graph.cost import counting
from onnxgrail.graph.cost.meter import dead_of
from onnxgrail.graph.trace.facts import key
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import decode, encode
from onnxgrail.machine.steps.journal import Folder
from onnxgrail.machine.steps.steps import Steps
from onnxgrail.search import kernels as measuring
from onnxgrail.search import latency
from onnxgrail.search.kernels import KERNELS, Kernels, Measured, attributed, measured_kernels
from onnxgrail.search.latency import latency_measure, latency_of, slower
from tests.tiny import cnn, mlp, tiny

BLOCK = 8
RATES = {"Conv": 3e-6, "MatMul": 1e-6, "Gemm": 1e-6}  # ms per multiply-accumulate of the fake machine


def prepared_of(model: ir.Model) -> Prepared:
    return prepare(model, None, Job(recipe=Recipe(samples=2, batch_size=2)))


def fake(prepared: Prepared, widths: Mapping[str, int], blocked: tuple[str, ...] = (), factor: float = 1.0) -> Measured:
    """Measurements of a machine with a known law: overhead, multiply-accumulates, output elements."""
    survey = prepared.survey
    dead = dead_of(survey, widths)
    work = {}
    for node in prepared.model.graph:
        if key(node) in survey.facts.shapes and key(node) not in survey.facts.constants:
            macs = counting.node_macs(node, survey, dead)
            size = float(np.prod(counting.shapes(survey, dead)(key(node))))
            rate = RATES.get(node.op_type, 0.0) * (factor if node.op_type == "Conv" else 1.0)
            work[key(node)] = 0.001 + rate * macs + 1e-6 * size
    return Measured(widths=widths, work=work, moves={}, blocked=blocked, ms=sum(work.values()) + 0.01)


def halves(prepared: Prepared) -> dict[str, int]:
    return {block.name: block.units // 2 for block in prepared.survey.blocks}


MODELS = {"mlp": lambda: mlp(2, 64, features=32), "cnn": lambda: cnn((32, 24))}


@pytest.mark.parametrize("name", MODELS)
def test_exact_at_full_widths_and_growing_with_every_width(name: str) -> None:
    prepared = prepared_of(MODELS[name]())
    kernels = Kernels(measured=(fake(prepared, {}), fake(prepared, halves(prepared))))
    cost = latency_measure(prepared, kernels)
    blocks = prepared.survey.blocks
    assert blocks
    full = {block.name: block.units for block in blocks}
    assert cost(full) == pytest.approx(kernels.measured[0].ms)
    assert cost(full) == cost({})
    for block in blocks:
        costs = [cost(full | {block.name: width}) for width in range(1, block.units + 1)]
        assert all(a <= b + 1e-12 for a, b in itertools.pairwise(costs))
        assert costs[0] < costs[-1]
    assert cost(halves(prepared)) == pytest.approx(kernels.measured[1].ms, rel=0.05)


def test_nodes_without_narrowed_channels_cost_the_same() -> None:
    model = tiny(
        "float[N,6] x => float[N,6] y, float[N,6] z",
        "a = MatMul(x, u)\nb = Relu(a)\ny = MatMul(b, d)\nz = MatMul(x, e)",
        {"u": (6, 8), "d": (8, 6), "e": (6, 6)},
    )
    prepared = prepared_of(model)
    full = fake(prepared, {})
    name = prepared.survey.blocks[0].name
    costs = []
    for slow in (1.0, 500.0):
        work = {**full.work, "z": full.work["z"] * slow}
        one = dataclasses.replace(full, work=work, ms=sum(work.values()))
        cost = latency_measure(prepared, Kernels(measured=(one,)))
        costs.append(cost.before - cost({name: 1}))
    assert costs[0] > 0
    assert costs[1] < 2 * costs[0]  # the slow node is of the same kind, and saves nothing itself


def test_channels_in_blocks_are_padded_and_odd_widths_take_the_plain_kernel() -> None:
    prepared = prepared_of(cnn((32, 24)))
    names = tuple(key(node) for node in prepared.model.graph if node.op_type == "Conv")
    first = next(b.name for b in prepared.survey.blocks if b.units == 32)
    odd = {block.name: block.units - 3 for block in prepared.survey.blocks}
    measured = (
        fake(prepared, {}, blocked=names),
        fake(prepared, halves(prepared), blocked=names),
        fake(prepared, odd, blocked=names[:1], factor=4.0),  # the plain kernels are four times as slow
    )
    cost = latency_measure(prepared, Kernels(measured=measured, block=BLOCK))
    assert cost({first: 29}) > cost({}) > cost({first: 24})  # the second convolution reads 29 channels
    assert cost({first: 20}) < cost({first: 24})  # less to write, as many multiplications
    assert cost({}) - cost({first: 20}) < 1.2 * (cost({}) - cost({first: 24}))


def test_a_pool_whose_channels_fill_no_blocks_takes_conversions() -> None:
    body = (
        "a = Conv<pads=[1,1,1,1]>(x, u)\nr = Relu(a)\np = MaxPool<kernel_shape=[2,2],strides=[2,2]>(r)\ny = Conv(p, v)"
    )
    prepared = prepared_of(tiny("float[N,8,16,16] x => float[] y", body, {"u": (32, 8, 3, 3), "v": (8, 32, 3, 3)}))
    block = prepared.survey.blocks[0].name
    plain, blocked = (
        latency_measure(prepared, Kernels(measured=(fake(prepared, {}, blocked=some),), block=BLOCK))
        for some in (("a", "y"), ("a", "p", "y"))
    )
    assert blocked({block: 24}) == pytest.approx(plain({block: 24}))
    converted = [blocked({block: width}) - plain({block: width}) for width in (28, 27)]
    assert converted[0] > converted[1] > 0  # 27 channels stay without blocks after the pool
    assert blocked({block: 28}) > blocked({block: 24})


def test_a_convolution_that_reads_fewer_channels_than_a_block_takes_a_conversion() -> None:
    body = "a = Conv<pads=[1,1,1,1]>(x, u)\nr = Relu(a)\ny = Conv(r, v)\nz = Conv(r, w)"
    arrays = {"u": (16, 8, 3, 3), "v": (8, 16, 1, 1), "w": (8, 16, 1, 1)}
    prepared = prepared_of(tiny("float[N,8,16,16] x => float[] y, float[] z", body, arrays))
    block = prepared.survey.blocks[0].name
    costs = []
    for ms in (0.0, 1.0):  # of a kernel that converts 8 channels
        measured = [fake(prepared, widths, blocked=("a", "y", "z")) for widths in ({}, {block: 8})]
        measured[0] = dataclasses.replace(measured[0], moves={"y": ms})
        cost = latency_measure(prepared, Kernels(measured=tuple(measured), block=BLOCK))
        assert cost({block: 8}) < cost({})
        costs.append(cost({block: 7}) - cost({block: 8}))
    assert costs[1] - costs[0] == pytest.approx(7 / 8, rel=0.2)  # once for both convolutions that read it


def test_convolutions_in_a_row_without_blocks_take_no_conversions() -> None:
    body = "a = Conv(x, u)\nb = Conv(a, v)\nc = Conv(b, w)\ny = Conv(c, e)"
    arrays = {"u": (32, 8, 3, 3), "v": (32, 32, 1, 1), "w": (32, 32, 1, 1), "e": (8, 32, 1, 1)}
    prepared = prepared_of(tiny("float[N,8,16,16] x => float[] y", body, arrays))
    first, second, third = (block.name for block in prepared.survey.blocks)
    costs = []
    for ms in (0.0, 1.0):  # of a kernel that converts 8 channels
        full = dataclasses.replace(fake(prepared, {}, blocked=("a", "b", "c", "y")), moves={"y": ms})
        costs.append(latency_measure(prepared, Kernels(measured=(full,), block=BLOCK)))
    size = 1 / 8  # of a channel, as a share of what is converted
    for widths, converted in (({first: 30}, 1), ({first: 30, second: 30}, 1), ({first: 30, third: 30}, 2)):
        more = costs[1](widths) - costs[0](widths)
        assert more == pytest.approx(30 * size * converted, rel=0.2)


def test_conversions_of_a_part_of_a_block_are_as_slow_as_measured() -> None:
    body = "a = Conv<pads=[1,1,1,1]>(x, u)\nr = PRelu(a, s)\ny = Conv<pads=[1,1,1,1]>(r, v)"
    arrays = {"u": (32, 8, 3, 3), "s": (32, 1, 1), "v": (8, 32, 3, 3)}
    prepared = prepared_of(tiny("float[N,8,16,16] x => float[] y", body, arrays))
    block = prepared.survey.blocks[0].name
    times = {32: 4.0, 24: 3.0, 15: 9.0}  # of the conversion of what the first convolution makes
    measured = [
        dataclasses.replace(fake(prepared, {block: width}, blocked=("a", "y")), moves={"a": ms})
        for width, ms in times.items()
    ]
    cost = latency_measure(prepared, Kernels(measured=tuple(measured), block=BLOCK))
    assert cost({block: 16}) < cost({block: 24}) < cost({})
    assert cost({block: 20}) > cost({})


def test_stored_kernels_give_the_same_cost() -> None:
    prepared = prepared_of(mlp(2, 64, features=32))
    kernels = Kernels(measured=(fake(prepared, {}), fake(prepared, halves(prepared), ("a",))), block=BLOCK, note="n")
    again = KERNELS.decode(decode(encode(KERNELS.encode(kernels))))
    assert again == kernels
    rng = np.random.default_rng(0)
    for _ in range(5):
        widths = {b.name: int(rng.integers(1, b.units + 1)) for b in prepared.survey.blocks}
        assert latency_measure(prepared, again)(widths) == latency_measure(prepared, kernels)(widths)


def test_kernels_are_measured_once_per_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prepared = prepared_of(mlp(1, 16))
    blocks, widths = prepared.survey.blocks, halves(prepared)

    def cost() -> float:
        folder = Folder(tmp_path)
        folder.begin({"run": 1})
        job = Job(recipe=Recipe(), steps=Steps(journal=folder))
        try:
            return latency_of(prepared, blocks, job)[0](widths)
        finally:
            folder.close()

    first = cost()
    monkeypatch.setattr(latency, "measured_kernels", lambda *_: pytest.fail("measured again"))
    assert cost() == first


@pytest.mark.parametrize("name", MODELS)
def test_measured_on_this_machine(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prepared = prepared_of(MODELS[name]())
    kernels = measured_kernels(prepared, prepared.survey.blocks, Recipe())
    assert not kernels.note
    assert len(kernels.measured) == 1 + len(measuring.NARROWER)
    products = {key(node) for node in prepared.model.graph if node.op_type in counting.PRODUCTS}
    assert products <= set(kernels.measured[0].work)
    assert kernels.measured[0].share > 0.3
    assert all(float(f"{ms:.2g}") == ms for ms in kernels.measured[0].work.values())
    cost = latency_measure(prepared, kernels)
    assert cost({}) == kernels.measured[0].ms
    assert not list(tmp_path.iterdir())  # the profile is deleted


def test_where_kernels_cannot_be_measured_multiply_accumulates_stand_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_of(mlp(1, 16))
    recipe = dataclasses.replace(Recipe(), providers=("CUDAExecutionProvider", "CPUExecutionProvider"))
    cost, note = latency_of(prepared, prepared.survey.blocks, Job(recipe=recipe))
    assert cost.before == counting.macs(prepared.model, prepared.survey) / prepared.samples
    assert "CUDAExecutionProvider" in note
    monkeypatch.setattr(profile, "LARGEST", 1)
    _, note = latency_of(prepared, prepared.survey.blocks, Job(recipe=Recipe()))
    assert "multiply-accumulates" in note
    assert "too long" in note


def test_narrower_models_that_do_not_run_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_of(mlp(1, 16))
    real = measuring.profiles_of

    def only_one(models: Any, feeds: Any, **more: Any) -> Any:
        if len(models) > 1:
            raise measuring.OnnxGrailError("a block cannot be narrowed")
        return real(models, feeds, **more)

    monkeypatch.setattr(measuring, "profiles_of", only_one)
    kernels = measured_kernels(prepared, prepared.survey.blocks, Recipe())
    assert [one.widths for one in kernels.measured] == [{}]


def test_branches_of_if_are_measured() -> None:
    body = (
        "c = ReduceSum<keepdims=0>(x)\nt = Greater(c, zero)\n"
        "y = If (t) <then_branch = one () => (float[N,6] p) {\n pa = MatMul(x, u)\n pr = Relu(pa)\n"
        " p = MatMul(pr, d)\n}, else_branch = two () => (float[N,6] q) {\n q = Identity(x)\n}>"
    )
    weights = {"u": (6, 8), "d": (8, 6), "zero": np.array(-1e9, np.float32)}
    prepared = prepared_of(tiny("float[N,6] x => float[N,6] y", body, weights))
    kernels = measured_kernels(prepared, prepared.survey.blocks, Recipe())
    assert not kernels.note
    assert sum("pa" in name for name in kernels.measured[0].work) == 1


def event(name: str, start: float, duration: float, op: str = "MatMul", **shapes: Any) -> dict[str, Any]:
    about = {"op_name": op, "node_index": "1", "input_type_shape": [], "output_type_shape": []} | shapes
    return {"cat": "Node", "name": name, "ts": start, "dur": duration, "args": about}


def test_time_of_kernels_without_bodies_and_warm_up() -> None:
    events: list[dict[str, Any]] = []
    for run in range(profile.WARM + 4):
        at, slow = run * 1000, 50 if run < profile.WARM else 1
        events.append({"cat": "Session", "name": "model_run", "ts": at, "dur": 900})
        events.append(event("a_kernel_time", at + 5, 10 * slow, output_type_shape=[{"float": [2, 3]}]))
        events.append(event("loop_kernel_time", at + 600, 100, op="Loop"))
        events.append(event("inner_kernel_time", at + 610, 30))
        events.append(event("inner_kernel_time", at + 650, 30))
    found, between = kernels_in(events)
    assert {kernel.name: kernel.ms for kernel in found} == pytest.approx({"a": 0.01, "loop": 0.04, "inner": 0.06})
    assert found[0].gave == (2, 3)
    assert between == pytest.approx((600 - 15) / 1e3)


def test_kernels_find_their_nodes_by_name_output_and_shape() -> None:
    model = tiny(
        "float[1,3,8,8] x => float[1,5] y",
        "a = Conv(x, w)\nb = Relu(a)\nc = Conv(b, v)\nd = Clip(c)\ne = GlobalAveragePool(d)\nf = Flatten(e)\n"
        "g = MatMul(f, m)\nh = Add(g, n)\ny = Relu(h)",
        {"w": (8, 3, 1, 1), "v": (6, 8, 1, 1), "m": (6, 5), "n": (5,)},
    )

    def kernel(name: str, op: str, took: tuple[int, ...] = (), gave: tuple[int, ...] = ()) -> Kernel:
        return Kernel(name=name, op=op, ms=1.0, took=took, gave=gave)

    found = attributed(
        model,
        [
            kernel("b_nchwc", "Conv", (1, 3, 8, 8), (1, 8, 8, 8)),  # named after the output of the fused Relu
            kernel("fused c_token_3", "FusedConv", (1, 8, 8, 8), (1, 6, 8, 8)),
            kernel("ReorderOutput_token_7", "ReorderOutput", (1, 8, 8, 8), (1, 8, 8, 8)),
            kernel("g/MatMulAddFusion", "Gemm"),
            kernel("unknown", "Neg", (9,), (9,)),
            kernel("InsertedPrecisionFreeCast_d_nchwc", "Conv"),  # float16 computes in float32 on the CPU
        ],
    )
    assert [(key(node), moved) for _, node, moved in found] == [
        ("a", False),
        ("c", False),
        ("a", True),
        ("g", False),
        ("c", False),
    ]


def test_slower_beyond_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_of(mlp(1, 16))

    def times(interval: tuple[float, float], median: float = 1.2) -> tuple[Times, ...]:
        one = Times(median=1.0, mean=1.0, p90=1.0, p99=1.0, spread=0.0)
        return one, dataclasses.replace(one, median=median, ratio=1.0, interval=interval)

    for interval, expected in (((0.8, 0.9), True), ((0.9, 1.1), False), ((1.1, 1.2), False)):
        monkeypatch.setattr(latency, "latencies", lambda *_, interval=interval: times(interval))
        assert (slower(prepared, prepared.model, Recipe()) is not None) == expected
    once = iter([times((0.8, 0.9)), times((0.9, 1.1))])  # the machine was busy
    monkeypatch.setattr(latency, "latencies", lambda *_: next(once))
    assert slower(prepared, prepared.model, Recipe()) is None
    monkeypatch.setattr(latency, "latencies", lambda *_: times((0.8, 0.9), 1.005))  # a few microseconds
    assert slower(prepared, prepared.model, Recipe()) is None
    monkeypatch.setattr(latency, "latencies", lambda *_: None)  # too large to open again
    assert slower(prepared, prepared.model, Recipe()) is None
