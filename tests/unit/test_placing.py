"""Nodes in 8 bits and in float in a quantized model: the cheapest division, and the graph that follows from it."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgrail.algebra.sides import Net, on_the_first
from onnxgrail.calibration.quantize.eight import AFTER, BETWEEN, LAYERS
from onnxgrail.calibration.quantize.placing import BORDER, Costs, placing_of, timed, unmeasured
from onnxgrail.calibration.quantize.static import Static, Trials, quantise_static
from onnxgrail.calibration.runtime.profile import Kernel, Profile
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Floats
from onnxgrail.graph.io.model_file import load, save
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.search import kernels
from onnxgrail.search.kernels import durations
from tests.tiny import tiny

RNG = np.random.default_rng(5)
SIGNATURE = "float[N,3,8,8] x => float[N,16,4,4] y"
BODY = """
    a = Conv<pads = [1, 1, 1, 1]>(x, w0, b0)
    r = Relu(a)
    c = Conv<pads = [1, 1, 1, 1]>(r, w1)
    s = Sigmoid(c)
    d = Mul(c, s)
    e = Add(d, r)
    p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(e)
    h = Add(p, half)
    f = Conv(h, w2)
    t = Tanh(f)
    g = Conv(t, w3)
    y = Sigmoid(g)
"""
WEIGHTS = {
    "w0": (16, 3, 3, 3),
    "b0": (16,),
    "w1": (16, 16, 3, 3),
    "w2": (16, 16, 1, 1),
    "w3": (16, 16, 1, 1),
    "half": np.array(0.5, np.float32),
}
FEEDS = [{"x": RNG.normal(size=(4, 3, 8, 8)).astype(np.float32)}]


def total(inside: Sequence[bool], first: Floats, second: Floats, nets: Sequence[Net]) -> float:
    cost = sum(first[n] if side else second[n] for n, side in enumerate(inside))
    return float(cost + sum(net.cost for net in nets if any(inside[r] != inside[net.maker] for r in net.readers)))


@given(seed=st.integers(0, 10**6), size=st.integers(1, 7))
def test_no_other_division_is_cheaper(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.random((2, size))
    kind = rng.random(size)
    first[kind < 0.1], second[kind > 0.9] = math.inf, math.inf
    nets = [
        Net(int(rng.integers(size)), tuple(rng.integers(0, size, rng.integers(4)).tolist()), float(rng.random()))
        for _ in range(rng.integers(8))
    ]
    found = total(on_the_first(first, second, nets).tolist(), first, second, nets)
    least = min(total(inside, first, second, nets) for inside in itertools.product((False, True), repeat=size))
    assert found == pytest.approx(least, abs=1e-6)


def layers_of(model: ir.Model, kinds: Sequence[str] = LAYERS) -> set[str]:
    return {node.name or "" for node in model.graph if node.op_type in kinds}


def named() -> ir.Model:
    model = tiny(SIGNATURE, BODY, WEIGHTS)
    for node in model.graph:
        node.name = node.outputs[0].name
    return model


def test_without_measurements_nodes_between_layers_save_conversions() -> None:
    """Beside a node that has no kernel in 8 bits, and after the last layer, they save none."""
    model = named()
    able = layers_of(model, (*LAYERS, *BETWEEN)) - {"y"}
    placing = placing_of(model, able, AFTER, unmeasured(model, sorted(layers_of(model))))
    assert placing.in_float() == {"t", "y"}
    assert placing.in_float(["c"]) == {"c", "s", "d", "e", "p", "h", "t", "y"}  # no conversion less in 8 bits
    assert placing.in_float(["a"]) >= {"a", "r"}  # a Relu is where its layer is
    assert placing.in_float(layers_of(model)) == {node.name for node in model.graph}


def test_layers_that_are_slower_are_in_float_unless_conversions_cost_more() -> None:
    model = named()
    able = layers_of(model, (*LAYERS, *BETWEEN)) - {"y"}
    full = {"a": 5.0, "c": 1.0, "f": 5.0, "g": 1.0}
    eight = {"a": 1.0, "c": 1.5, "f": 1.0, "g": 3.0}
    near = placing_of(model, able, AFTER, Costs(eight, full, lambda _: 0.4)).in_float()
    assert near == {"t", "g", "y"}  # two conversions cost more than c loses
    far = placing_of(model, able, AFTER, Costs(eight, full, lambda _: 0.01)).in_float()
    assert {"c", "g"} <= far
    assert {"a", "r", "f"}.isdisjoint(far)


def kinds_run(model: ir.Model, folder: Path) -> Counter[str]:
    """The operators that ONNX Runtime runs."""
    made = folder / "optimised.onnx"
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(made)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(to_bytes(model), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in load(made.read_bytes()).graph)


@pytest.mark.parametrize("without", [(), ("c",), ("f",), ("c", "f", "g")])
def test_every_layer_in_8_bits_gets_an_integer_kernel(without: tuple[str, ...], tmp_path: Path) -> None:
    """Nodes after it in float read the rounded values: its kernel could not write others."""
    save(named(), tmp_path / "source.onnx")

    def lost(model: ir.Model) -> float:
        eight = {node.name for node in model.graph if node.op_type == "Conv" and weight_of(node) == "DequantizeLinear"}
        return 0.2 * len(eight.intersection(without))

    def times(models: Sequence[ir.Model]) -> list[dict[str, float]]:
        each = [dict.fromkeys((node.name or "" for node in model.graph), 0.01) for model in models]
        return [one | dict.fromkeys(layers_of(models[0]), slow) for one, slow in zip(each, (10.0, 0.1), strict=True)]

    target = tmp_path / "target.onnx"
    given = Static(feeds=FEEDS, trials=Trials(lost, 0.01, lambda *_: 2.0, kernels=times))
    kept, why = quantise_static(tmp_path / "source.onnx", target, given)
    made = load(target.read_bytes())
    assert set(kept) == set(without)
    assert ("falls from" in why) == bool(without)
    run = kinds_run(made, tmp_path)
    assert (run["QLinearConv"], run["Conv"] + run["FusedConv"]) == (4 - len(without), len(without))
    with open_session(target) as session, open_session(tmp_path / "source.onnx") as original:
        ours, theirs = session.run(FEEDS[0])["y"], original.run(FEEDS[0])["y"]
    assert 0 < np.abs(ours - theirs).max() < 0.1
    assert run["QLinearMul"] == int(not {"c"} & set(without))
    assert not run["QLinearSigmoid"] > 1  # no layer follows the last one


def weight_of(node: ir.Node) -> str:
    maker = node.inputs[1].producer() if node.inputs[1] is not None else None
    return maker.op_type if maker is not None else ""


@pytest.mark.parametrize(
    ("layer", "weight"),
    [
        ("Conv", (16, 16, 3, 3)),
        ("Conv<group = 4>", (16, 4, 3, 3)),
        ("ConvTranspose", (16, 8, 2, 2)),
        ("Gemm", (16, 8)),
        ("Gemm<transB = 1>", (8, 16)),
    ],
)
def test_a_layer_in_float_between_layers_in_8_bits_keeps_its_weights(
    layer: str, weight: tuple[int, ...], tmp_path: Path
) -> None:
    """ONNX Runtime would round them, with one scale for all."""
    gemm = layer.startswith("Gemm")
    body = "f = GlobalAveragePool(x)\ni = Flatten(f)" if gemm else "i = Identity(x)"
    first = last = "Gemm" if gemm else "Conv"
    channels = 8 if gemm or "Transpose" in layer else 16
    weights = {
        "u": (16, 16) if gemm else (16, 16, 1, 1),
        "w": weight,
        "v": (channels, 4) if gemm else (4, channels, 1, 1),
    }
    body += f"\na = {first}(i, u)\nb = {layer}(a, w)\nc = Relu(b)\ny = {last}(c, v)"
    model = tiny("float[N,16,8,8] x => float[] y", body, weights)
    for node in model.graph:
        node.name = node.outputs[0].name
    save(model, tmp_path / "source.onnx")

    def loss(one: ir.Model) -> float:
        return float(any(n.name == "b" and weight_of(n) == "DequantizeLinear" for n in one.graph))

    feeds = [{"x": RNG.normal(size=(4, 16, 8, 8)).astype(np.float32)}]
    few = Trials(
        loss, 0.01, lambda *_: 2.0, kernels=lambda models: [dict.fromkeys("aby", 9.0), dict.fromkeys("aby", 0.1)]
    )
    for trials, everywhere in ((few, False), (few, True)):
        given = Static(feeds=feeds, trials=trials, everywhere=everywhere)
        kept, _ = quantise_static(tmp_path / "source.onnx", tmp_path / "target.onnx", given)
        assert kept == ("b",)
        made = load((tmp_path / "target.onnx").read_bytes())
        run = kinds_run(made, tmp_path)
        kinds = ("QGemm", "Gemm", "MatMul") if gemm else ("QLinearConv", "Conv", "FusedConv", "ConvTranspose")
        assert (run[kinds[0]], sum(run[kind] for kind in kinds[1:])) == (2, 1), run
        with open_session(tmp_path / "target.onnx") as session, open_session(tmp_path / "source.onnx") as original:
            ours, theirs = session.run(feeds[0])["y"], original.run(feeds[0])["y"]
        assert 0 < np.abs(ours - theirs).max() < 0.05 * np.abs(theirs).max()


def test_slower_layers_are_told_and_stay_in_float(tmp_path: Path) -> None:
    save(named(), tmp_path / "source.onnx")

    def times(models: Sequence[ir.Model]) -> list[dict[str, float]]:
        first = dict.fromkeys(layers_of(models[0]), 1.0)
        return [first, {**dict.fromkeys(first, 0.1), "g": 5.0}]

    trials = Trials(lambda _: 0.0, 0.01, lambda *_: 2.0, kernels=times)
    kept, why = quantise_static(tmp_path / "source.onnx", tmp_path / "target.onnx", Static(feeds=FEEDS, trials=trials))
    assert (kept, why) == (("g",), "1 layer is slower in 8 bits on this machine")


@pytest.mark.parametrize(
    ("speed", "layers", "told"),
    [(0.5, 4, "in 8 bits, layers take 2.00 times as long on this machine; the weights have 8 bits"), (2.0, 0, "")],
)
def test_where_single_kernels_are_slower_the_whole_decides(
    speed: float, layers: int, told: str, tmp_path: Path
) -> None:
    save(named(), tmp_path / "source.onnx")
    slow = Trials(
        lambda _: 0.0, 0.01, lambda *_: speed, kernels=lambda models: [{}, dict.fromkeys(layers_of(models[0]), 1.0)]
    )
    kept, why = quantise_static(tmp_path / "source.onnx", tmp_path / "target.onnx", Static(feeds=FEEDS, trials=slow))
    assert (len(kept), why) == (layers, told)
    ops = {node.op_type for node in load((tmp_path / "target.onnx").read_bytes()).graph}
    assert ("QuantizeLinear" in ops) == (speed > 1)


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), common=st.sampled_from([0.0, 1e-9, 1.0, 1e9]))
def test_times_decide_on_speed_alone(seed: int, common: float) -> None:
    """Any times, of all nodes or of some, give a model that runs, whose layers in 8 bits have integer kernels."""
    rng = np.random.default_rng(seed)

    def times(models: Sequence[ir.Model]) -> list[dict[str, float]]:
        names = [[node.name or "" for node in model.graph if rng.random() < 0.8] for model in models]
        return [{name: float(common * rng.exponential() ** 3) for name in each} for each in names]

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save(named(), folder / "source.onnx")
        trials = Trials(lambda _: 0.0, 0.01, lambda *_: 2.0, kernels=times)
        kept, _ = quantise_static(folder / "source.onnx", folder / "target.onnx", Static(feeds=FEEDS, trials=trials))
        made = load((folder / "target.onnx").read_bytes())
        eight = {n.name for n in made.graph if n.op_type in LAYERS and weight_of(n) == "DequantizeLinear"}
        assert eight == layers_of(named()) - set(kept)
        assert kinds_run(made, folder)["QLinearConv"] == len(eight)
        with open_session(folder / "target.onnx") as session, open_session(folder / "source.onnx") as original:
            ours, theirs = session.run(FEEDS[0])["y"], original.run(FEEDS[0])["y"]
    assert np.abs(ours - theirs).max() < 0.1


def test_kernels_are_measured_and_conversions_cost_by_size(tmp_path: Path) -> None:
    save(named(), tmp_path / "source.onnx")
    seen: list[ir.Model] = []
    trials = Trials(lambda _: 0.0, 0.01, lambda *_: 0.5, kernels=lambda models: seen.extend(models) or ())
    quantise_static(tmp_path / "source.onnx", tmp_path / "target.onnx", Static(feeds=FEEDS, trials=trials))
    ready, whole = seen
    times = durations(seen, FEEDS[0], Setup().providers)
    assert layers_of(ready) <= set(times[0])
    assert layers_of(ready) <= set(times[1])
    assert all(ms >= 0 for each in times for ms in each.values())
    made = [node for node in whole.graph if node.op_type == "QuantizeLinear"]
    given = {node.name or "": 0.001 + 1e-6 * np.prod(size) for node, size in zip(made, sizes(made), strict=True)}
    costs = timed(ready, whole, [{}, given], FEEDS[0])
    assert costs.border("x") == pytest.approx(BORDER * (0.001 + 1e-6 * FEEDS[0]["x"].size), rel=1e-3)


@pytest.mark.parametrize("ms", [6.0, 9.0, 2.0])
def test_measuring_a_kernel_takes_time_itself(ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four kernels of 10 ms in a run of 6 ms: each is measured 1 ms too long."""
    times = {"a": 5.0, "c": 2.0, "f": 2.0, "g": 1.0}
    found = tuple(Kernel(name=name, op="Conv", ms=one, took=(), gave=()) for name, one in times.items())
    monkeypatch.setattr(kernels, "profiles_of", lambda *_, **__: (Profile(kernels=found, ms=ms),))
    bare, plain = (durations([named()], FEEDS[0], Setup().providers, bare=bare)[0] for bare in (True, False))
    assert plain == times
    assert (bare["a"], bare["c"]) == pytest.approx((5 - (10 - ms) / 4, 2 - (10 - ms) / 4))
    assert bare["g"] == max(0, 1 - (10 - ms) / 4)


def test_for_other_machines_other_nodes_have_8_bits_where_that_saves_most_conversions(tmp_path: Path) -> None:
    target = tmp_path / "target.onnx"
    few = BODY[: BODY.index("    t = ")].replace("    f = Conv(h", "    y = Conv(h")
    for body, symmetric, inner in ((BODY, False, False), (few, False, True), (few, True, False)):
        weights = {name: numbers for name, numbers in WEIGHTS.items() if name in body}
        save(tiny(SIGNATURE, body, weights), tmp_path / "source.onnx")
        trials = Trials(lambda _: 0.0, 0.01, lambda *_: 1.0)
        given = Static(feeds=FEEDS, everywhere=True, symmetric=symmetric, trials=trials)
        assert quantise_static(tmp_path / "source.onnx", target, given) == ((), "")
        made = load(target.read_bytes())
        (product,) = (node for node in made.graph if node.op_type == "Mul")
        assert (product.outputs[0].uses()[0].node.op_type == "QuantizeLinear") == inner


def sizes(nodes: Sequence[ir.Node]) -> list[tuple[int, ...]]:
    shapes = {"x": (4, 3, 8, 8)}
    full = (4, 16, 8, 8)
    return [shapes.get(n.inputs[0].name or "", full if n.inputs[0].name in "arcsde" else (4, 16, 4, 4)) for n in nodes]  # type: ignore[union-attr]
