"""Weights in 8 bits that ONNX Runtime converts when it loads a model, and when layers compute in 8 bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.quantize.light import light_of
from onnxgrail.calibration.quantize.prepare import prepare
from onnxgrail.calibration.quantize.static import FASTER, Static, Trials, quantise_static
from onnxgrail.calibration.runtime.session import Setup, open_session, write_optimised
from onnxgrail.core import Array, Feed
from onnxgrail.errors import ModelError
from onnxgrail.graph.bits.folded import folded, lifted, rounded, weights_of
from onnxgrail.graph.io.model_file import load, save
from onnxgrail.graph.io.serial import to_bytes
from tests.tiny import ints, tiny

RNG = np.random.default_rng(5)
LAYERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Conv": ("float[N,8,6,6] x => float[N,16,6,6] y", "y = Conv(x, w)", {"w": (16, 8, 1, 1)}),
    "depthwise": ("float[N,64,6,6] x => float[N,64,4,4] y", "y = Conv<group = 64>(x, w)", {"w": (64, 1, 3, 3)}),
    "ConvTranspose": (
        "float[N,8,6,6] x => float[N,16,7,7] y",
        "y = ConvTranspose<group = 2>(x, w)",
        {"w": (8, 8, 2, 2)},
    ),
    "MatMul": ("float[N,5,16] x => float[N,5,24] y", "y = MatMul(x, w)", {"w": (16, 24)}),
    "MatMul, weight first": ("float[N,16,5] x => float[N,24,5] y", "y = MatMul(w, x)", {"w": (24, 16)}),
    "MatMul, three axes": ("float[3,5,16] x => float[3,5,24] y", "y = MatMul(x, w)", {"w": (3, 16, 24)}),
    "Gemm": ("float[N,16] x => float[N,24] y", "y = Gemm(x, w)", {"w": (16, 24)}),
    "Gemm, transposed": ("float[N,16] x => float[N,24] y", "y = Gemm<transB = 1>(x, w)", {"w": (24, 16)}),
    "Gather": ("float[N,24] x => float[N,24] y", "t = Gather(w, i)\n y = Add(x, t)", {"w": (16, 24), "i": ints(3)}),
    "LSTM": (
        "float[5,N,16] x => float[5,1,N,8] y",
        "y = LSTM<hidden_size = 8>(x, w, r)",
        {"w": (1, 32, 16), "r": (1, 32, 8)},
    ),
    "GRU": (
        "float[5,N,16] x => float[5,1,N,8] y",
        "y = GRU<hidden_size = 8>(x, w, r)",
        {"w": (1, 24, 16), "r": (1, 24, 8)},
    ),
    "two readers": (
        "float[N,16] x => float[N,16] y",
        "a = MatMul(x, w)\n b = Relu(a)\n y = MatMul(b, w)",
        {"w": (16, 16)},
    ),
}


def outputs(model: ir.Model) -> Array:
    shape = [size if isinstance(size, int) else 3 for size in model.graph.inputs[0].shape or ()]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    with open_session(to_bytes(model)) as session:
        return np.asarray(session.run({"x": x})["y"])


def operators(model: ir.Model, folder: Path) -> Counter[str]:
    write_optimised(to_bytes(model), folder / "optimised.onnx", Setup())
    return Counter(node.op_type for node in onnx.load(folder / "optimised.onnx").graph.node)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_run_as_with_rounded_float_weights(name: str, tmp_path: Path) -> None:
    signature, body, weights = LAYERS[name]
    model = tiny(signature, body, weights)
    expected = model.clone()
    found = weights_of(expected)
    assert {weight.name for weight in found} == weights.keys() - {"i"}
    for weight in found:
        codes, scale = rounded(weight.array, weight.axes)
        near = codes.astype(np.float32) * scale
        assert 0 < np.abs(near - weight.array).max() <= 0.51 * scale.max()
        weight.value.const_value = ir.tensor(near, name=weight.value.name)
    made = folded(model)
    np.testing.assert_array_equal(outputs(made), outputs(expected))
    assert operators(made, tmp_path) == operators(model, tmp_path)  # no conversion is left
    assert len(to_bytes(made)) < len(to_bytes(model))
    with pytest.raises(ModelError, match="already"):
        onnxgrail.compress(ir.to_proto(made), quantize="int8", ratio=0)


def test_weights_in_branches_and_weights_in_parts() -> None:
    """A weight of the model that a branch reads, one of the branch, and one that is cut and turned first."""
    body = """
        first = MatMul(x, u)
        size = ReduceMax<keepdims = 0>(x)
        positive = Greater(size, zero)
        y = If (positive) <
            then_branch = one () => (float[N,16] o) { o = MatMul(first, v) },
            else_branch = two () => (float[N,16] p) {
                a = Slice(w, start, stop, start)
                b = Slice(w, stop, end, start)
                c = Concat<axis = 0>(b, a)
                d = Transpose(c)
                p = MatMul(first, d)
            }
        >
    """
    places = {"start": ints(0), "stop": ints(7), "end": ints(16), "zero": np.float32(0)}
    weights = {"u": (16, 16), "v": (16, 16), "w": (16, 16), **places}
    model = tiny("float[N,16] x => float[N,16] y", body, weights, recorded=False)
    choice = next(node for node in model.graph if node.op_type == "If")
    inner = choice.attributes["then_branch"].as_graph()
    value = model.graph.initializers.pop("v")  # the branch gets it
    inner.register_initializer(value)
    made = folded(model)
    assert {"u/8", "w/8"} < set(made.graph.initializers)
    choice = next(node for node in made.graph if node.op_type == "If")
    assert set(choice.attributes["then_branch"].as_graph().initializers) == {"v/8", "v/s"}
    for sign in (1, -1):
        x = sign * np.abs(RNG.normal(size=(3, 16))).astype(np.float32)
        runs = []
        for one in (model, made):
            with open_session(to_bytes(one)) as session:
                runs.append(np.asarray(session.run({"x": x})["y"]))
        assert 0 < np.abs(runs[1] - runs[0]).max() < 0.05 * np.abs(runs[0]).max()


def test_what_stays_in_float32() -> None:
    """Weights that are read otherwise, too; inputs; weights that would overflow, are not finite, or save nothing."""
    body = """
        a = MatMul(x, u)
        b = MatMul(a, v)
        c = Add(b, v)
        d = MatMul(c, w)
        e = MatMul(d, p)
        y = MatMul(e, q)
    """
    weights: dict[str, Any] = dict.fromkeys("uvwp", (16, 16))
    weights["q"] = np.full((16, 16), 1e6, np.float32)
    model = tiny("float[16,16] x, float[16,16] w => float[16,16] y", body, weights)
    weight = model.graph.initializers["u"]
    assert weight.const_value is not None
    weight.const_value = ir.tensor(np.full((16, 16), np.inf, np.float32), name="u")
    assert {one.name for one in weights_of(model)} == {"p", "q"}
    made = folded(model, {one.name for one in weights_of(model)})
    kinds = {name: value.dtype for name, value in made.graph.initializers.items()}
    float32, float16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
    assert kinds == {**dict.fromkeys("uvwq", float32), "p/16": float16}
    assert not weights_of(tiny("float[N,4] x => float[N,4] y", "y = MatMul(x, w)", {"w": (4, 4)}))


def test_weights_that_are_inputs_stop_being_inputs(tmp_path: Path) -> None:
    """As the tool for static quantization does; other inputs with a value stay."""
    body = "a = MatMul(x, w)\n y = Add(a, b)"
    model = tiny("float[N,16] x => float[N,24] y", body, {"w": (16, 24), "b": (24,)}, opset=13, ir_version=3)
    assert [value.name for value in model.graph.inputs] == ["x", "w", "b"]
    save(model, tmp_path / "source.onnx")
    feeds = [{"x": RNG.normal(size=(64, 16)).astype(np.float32)}]
    given = Static(feeds=feeds, trials=Trials(lambda _: 0.0, 0.01, lambda *_: 0.5))
    quantise_static(tmp_path / "source.onnx", tmp_path / "target.onnx", given)
    made = load((tmp_path / "target.onnx").read_bytes())
    assert [value.name for value in made.graph.inputs] == ["x", "b"]
    assert made.graph.initializers["w/8"].dtype == ir.DataType.INT8
    assert np.abs(outputs_of(made, feeds[0]) - outputs_of(model, feeds[0])).max() < 0.1


def test_normalizations_whose_numbers_are_inputs_can_be_folded(tmp_path: Path) -> None:
    """A runtime folds no constant that a caller may replace: files of old versions list all constants as inputs."""
    body = "a = Conv(x, w, b)\n n = BatchNormalization(a, s, b, b, s)\n y = Relu(n)"
    weights = {"w": (16, 8, 3, 3), "b": (16,), "s": np.ones(16, np.float32)}
    model = tiny("float[N,8,6,6] x => float[N,16,4,4] y", body, weights, opset=13, ir_version=3)
    save(lifted(model), tmp_path / "source.onnx")
    prepare(tmp_path / "source.onnx", tmp_path / "prepared.onnx")
    assert "BatchNormalization" not in types_of(load((tmp_path / "prepared.onnx").read_bytes()))
    save(model, tmp_path / "source.onnx")
    feeds = [{"x": RNG.normal(size=(4, 8, 6, 6)).astype(np.float32)}]
    for speed, everywhere in ((0.5, False), (2.0, False), (2.0, True)):
        given = Static(feeds=feeds, trials=Trials(lambda _: 0.0, 0.01, lambda *_, s=speed: s), everywhere=everywhere)
        quantise_static(tmp_path / "source.onnx", tmp_path / "target.onnx", given)
        made = load((tmp_path / "target.onnx").read_bytes())
        assert [value.name for value in made.graph.inputs] == ["x"]
        assert speed < 1 or "BatchNormalization" not in types_of(made)


BODY = """
    a = Conv<pads = [1, 1, 1, 1]>(x, w0)
    r = Relu(a)
    c = Conv<pads = [1, 1, 1, 1]>(r, w1)
    s = Sigmoid(c)
    d = Mul(c, s)
    y = Conv(d, w2)
"""
WEIGHTS = {"w0": (16, 3, 3, 3), "w1": (16, 16, 3, 3), "w2": (16, 16, 1, 1)}


def types_of(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("speed", [FASTER / 2, FASTER * 2])
@pytest.mark.parametrize("loss", [0.0, 0.5])
def test_layers_compute_in_8_bits_only_if_they_are_faster_and_good_enough(
    speed: float, loss: float, tmp_path: Path
) -> None:
    save(tiny("float[N,3,6,6] x => float[N,16,6,6] y", BODY, WEIGHTS), tmp_path / "source.onnx")
    feeds = [{"x": RNG.normal(size=(4, 3, 6, 6)).astype(np.float32)}]

    def lost(model: ir.Model) -> float:
        return loss if types_of(model).count("DequantizeLinear") > 3 else 0.0

    trials = Trials(lost, 0.01, lambda before, after: speed if "QuantizeLinear" in types_of(after) else 1.0)
    target = tmp_path / "target.onnx"
    kept, why = quantise_static(tmp_path / "source.onnx", target, Static(feeds=feeds, trials=trials))
    made = load(target.read_bytes())
    inside = speed > FASTER and not loss
    assert ("QuantizeLinear" in types_of(made)) == inside
    assert len(kept) == (0 if inside else 3)
    if speed < FASTER:
        assert why == f"in 8 bits, layers take {1 / speed:.2f} times as long on this machine; the weights have 8 bits"
    assert target.stat().st_size < 0.8 * (tmp_path / "source.onnx").stat().st_size
    everywhere = Static(feeds=feeds, everywhere=True, trials=trials)
    quantise_static(tmp_path / "source.onnx", target, everywhere)
    assert "Cast" not in types_of(load(target.read_bytes()))


def test_layers_in_float_of_a_fast_model_have_weights_in_8_bits(tmp_path: Path) -> None:
    save(tiny("float[N,3,6,6] x => float[N,16,6,6] y", BODY, WEIGHTS), tmp_path / "source.onnx")
    feeds = [{"x": RNG.normal(size=(4, 3, 6, 6)).astype(np.float32)}]

    def lost(model: ir.Model) -> float:
        second = next(node for node in model.graph if node.outputs[0].name == "c" or "c_Q" in str(node.outputs[0].name))
        maker = second.inputs[1].producer() if second.inputs[1] is not None else None
        return 0.2 if maker is not None and maker.op_type == "DequantizeLinear" else 0.0

    target = tmp_path / "target.onnx"
    given = Static(feeds=feeds, trials=Trials(lost, 0.01, lambda *_: 2.0))
    kept, why = quantise_static(tmp_path / "source.onnx", target, given)
    made = load(target.read_bytes())
    assert len(kept) == 1
    assert "the loss on calibration samples falls from 20.00% to 0.00%" in why
    assert {"QuantizeLinear", "Cast"} <= set(types_of(made))
    assert made.graph.initializers["w1/8"].dtype == ir.DataType.INT8


def test_weights_that_lose_much_in_8_bits_have_16(tmp_path: Path) -> None:
    save(tiny("float[N,3,6,6] x => float[N,16,6,6] y", BODY, WEIGHTS), tmp_path / "source.onnx")
    feeds = [{"x": RNG.normal(size=(4, 3, 6, 6)).astype(np.float32)}]
    target = tmp_path / "target.onnx"
    trials = Trials(lambda model: 0.2 if "w2/8" in model.graph.initializers else 0.0, 0.01, lambda *_: 0.5)
    _, why = quantise_static(tmp_path / "source.onnx", target, Static(feeds=feeds, trials=trials))
    weights = load(target.read_bytes()).graph.initializers
    assert why.endswith("; the weights have 8 bits, 1 of them 16")
    assert weights["w2/16"].dtype == ir.DataType.FLOAT16
    assert weights["w1/8"].dtype == ir.DataType.INT8


def test_a_narrowed_model_that_loses_too_much_gets_more_weights_in_16_bits_than_a_search_has_chosen(
    tmp_path: Path,
) -> None:
    save(tiny("float[N,3,6,6] x => float[N,16,6,6] y", BODY, WEIGHTS), tmp_path / "source.onnx")
    feeds = [{"x": RNG.normal(size=(4, 3, 6, 6)).astype(np.float32)}]

    def loss(model: ir.Model) -> float:
        return 0.2 if "w2/8" in model.graph.initializers else 0.0

    for most, bits in ((0.3, "w2/8"), (0.1, "w2/16")):
        trials = Trials(loss, most, lambda *_: 0.5, holds=lambda model, most=most: loss(model) <= most)
        quantise_static(tmp_path / "source.onnx", tmp_path / "o.onnx", Static(feeds=feeds, half=["w1"], trials=trials))
        assert {"w1/16", bits} <= load((tmp_path / "o.onnx").read_bytes()).graph.initializers.keys()


@pytest.mark.parametrize("normalized", [True, False])
def test_nodes_keep_their_order_unless_folded_normalizations_save_bytes(normalized: bool, tmp_path: Path) -> None:
    body = f"""
        a = Conv<group = 256>(x, w)
        b = {"BatchNormalization(a, scale, shift, shift, scale)" if normalized else "Relu(a)"}
        first = Sigmoid(b)
        second = Tanh(x)
        c = Conv<group = 256>(second, u)
        y = Add(c, first)
    """
    ones = {name: np.ones(256, np.float32) for name in ("scale", "shift")} if normalized else {}
    model = tiny("float[N,256,6,6] x => float[N,256,4,4] y", body, {"w": (256, 1, 3, 3), "u": (256, 1, 3, 3), **ones})
    save(model, tmp_path / "source.onnx")
    feeds = [{"x": (1 + RNG.normal(size=(8, 256, 6, 6))).astype(np.float32)}]
    target = tmp_path / "target.onnx"
    given = Static(feeds=feeds, trials=Trials(lambda _: 0.0, 0.01, lambda *_: 0.5))
    quantise_static(tmp_path / "source.onnx", target, given)
    made = load(target.read_bytes())
    assert "BatchNormalization" not in types_of(made)
    if not normalized:
        assert types_of(made) == ["Cast", "Mul", "Cast", "Mul", *types_of(model)]
    a, b = (outputs_of(one, feeds[0]) for one in (model, made))
    assert np.abs(a - b).max() < 0.05 * np.abs(a).max()


def outputs_of(model: ir.Model, feed: Feed) -> Array:
    with open_session(to_bytes(model)) as session:
        return np.asarray(session.run(feed)["y"])


@pytest.mark.parametrize("real", [True, False])
def test_biases_do_not_follow_random_inputs(real: bool, tmp_path: Path) -> None:
    save(tiny("float[N,3,6,6] x => float[N,16,6,6] y", BODY, WEIGHTS), tmp_path / "source.onnx")
    feeds = [{"x": RNG.normal(size=(4, 3, 6, 6)).astype(np.float32)}]
    given = Static(feeds=feeds, real=real, trials=Trials(lambda _: 0.0, 0.01, lambda *_: 0.5))
    quantise_static(tmp_path / "source.onnx", tmp_path / "target.onnx", given)
    biases = [name for name in load((tmp_path / "target.onnx").read_bytes()).graph.initializers if name.endswith("/b")]
    assert bool(biases) == real


def test_only_the_weights_that_a_choice_names_lose_bits() -> None:
    model = tiny("float[N,3,6,6] x => float[N,16,6,6] y", BODY, WEIGHTS)
    before = {weight.name: weight for weight in weights_of(model)}
    first, second, *rest = before
    made = light_of(model, ()).with_bits({first: 8, second: 16, "unknown": 8, **dict.fromkeys(rest, 32)})
    found = made.graph.initializers
    assert (found[f"{first}/8"].dtype, found[f"{second}/16"].dtype) == (ir.DataType.INT8, ir.DataType.FLOAT16)
    assert set(rest) <= set(found)
    for name, few in ((first, 8), (second, 16)):
        form, array = before[name].forms()[few], before[name].array
        alone = light_of(model, ()).with_bits({name: few})
        saved = len(to_bytes(model)) - len(to_bytes(alone))
        assert abs(saved - (array.nbytes - form.bytes(array.shape))) < 40
        codes = form.numbers(array)
        assert 0 < np.abs(codes - array).max() < (0.01 if few == 8 else 1e-3) * np.abs(array).max()
