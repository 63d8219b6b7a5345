"""Ranges of activations, narrowed by the errors of the layers that read them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.quantize import static
from onnxgrail.calibration.quantize.eight import LAYERS, Source, by_tool
from onnxgrail.calibration.quantize.prepare import prepare
from onnxgrail.calibration.quantize.ranges import shares_of
from onnxgrail.calibration.quantize.shifts import shifts_in_8_bits
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.core import Array, Feed
from onnxgrail.graph.bits.ranges import narrow, ranges_of, shift
from onnxgrail.graph.io.model_file import load, save
from onnxgrail.graph.io.serial import to_bytes
from tests.tiny import tiny

RNG = np.random.default_rng(3)
BODY = """
    a = Conv(x, w0, b0)
    r = Relu(a)
    p = MaxPool<kernel_shape = [2, 2]>(r)
    y = Conv(p, w1, b1)
"""
WEIGHTS = {"w0": (8, 3, 3, 3), "b0": (8,), "w1": (4, 8, 1, 1), "b1": (4,)}
SIGNATURE = "float[N,3,6,6] x => float[N,4,3,3] y"
FEED = {"x": RNG.normal(size=(8, 3, 6, 6)).astype(np.float32)}


def written(folder: Path, model: ir.Model, feed: Feed = FEED) -> tuple[ir.Model, ir.Model]:
    """The prepared float model, and what ONNX Runtime's tool makes of it."""
    save(model, folder / "source.onnx")
    prepare(folder / "source.onnx", folder / "prepared.onnx")
    ready = load((folder / "prepared.onnx").read_bytes())
    return ready, by_tool(Source(folder / "prepared.onnx", ready, {}, {}), [feed], folder / "target.onnx")


def run(model: ir.Model, feed: Feed = FEED) -> Array:
    with open_session(to_bytes(model)) as session:
        return np.asarray(next(iter(session.run(feed).values())), np.float64)


def biases(model: ir.Model) -> list[Array]:
    layers = [node for node in model.graph if node.op_type == "Conv"]
    return [math.prod(v.const_value.numpy() for v in node.inputs[2].producer().inputs[:2]) for node in layers]


def test_what_a_relu_makes_of_a_tensor_shares_its_range_and_outputs_keep_theirs(tmp_path: Path) -> None:
    body = "a = Conv<pads = [1, 1, 1, 1]>(x, w0, b0)\n r = Relu(a)\n y = Conv(r, w1, b1)"
    _, whole = written(tmp_path, tiny("float[N,3,6,6] x => float[N,4,6,6] y", body, WEIGHTS))
    assert [(one.tensor, set(one.scales)) for one in ranges_of(whole)] == [
        ("x", {"x_scale"}),
        ("r", {"a_scale", "r_scale"}),
    ]


def test_biases_keep_their_numbers_in_narrower_ranges(tmp_path: Path) -> None:
    ready, whole = written(tmp_path, tiny(SIGNATURE, BODY, WEIGHTS))
    before, scale = biases(whole), whole.graph.initializers["x_scale"].const_value.numpy()
    far = np.abs(run(whole) - run(ready)).max()
    names = [name for one in ranges_of(whole) for name in one.scales]
    narrow(whole, dict.fromkeys(names, 0.9))
    for old, new in zip(before, biases(whole), strict=True):
        np.testing.assert_allclose(new, old, atol=2e-4)  # their steps are 1e-4
    assert whole.graph.initializers["x_scale"].const_value.numpy() == pytest.approx(0.9 * scale)
    assert 0 < np.abs(run(whole) - run(ready)).max() < far + 0.2 * np.abs(run(ready)).max()


def rare(count: int) -> Array:
    """Half a million small values, and some that are four times as large."""
    x = RNG.uniform(0, 0.25, size=(8192, 64)).astype(np.float32)
    x[:count, 5] = 1
    return x


@pytest.mark.parametrize(("count", "share"), [(1, 0.7), (100, 1.0)])
def test_rare_values_are_cut_off_if_steps_cost_more(count: int, share: float, tmp_path: Path) -> None:
    x = rare(count)
    model = tiny("float[N,64] x => float[N,4] y", "y = Gemm(x, w, b)", {"w": (64, 4), "b": (4,)})
    ready, whole = written(tmp_path, model, {"x": x})
    shares = shares_of(ready, ranges_of(whole), [{"x": x[:5000]}, {"x": x[5000:]}], LAYERS)
    assert shares == ({} if share == 1 else {"x_scale": share})
    assert shares_of(ready, ranges_of(whole), [], LAYERS) == {}


def test_biases_that_fill_32_bits_keep_ranges_as_they_are(tmp_path: Path) -> None:
    """The tool gives channels with tiny weights the smallest scale that their bias allows."""
    w = RNG.normal(size=(4, 3, 1, 1)).astype(np.float32)
    w[1] = 1e-9
    model = tiny("float[N,3,6,6] x => float[N,4,6,6] y", "y = Conv(x, w, b)", {"w": w, "b": np.ones(4, np.float32)})
    ready, whole = written(tmp_path, model)
    (known,) = ranges_of(whole)
    assert known.least == pytest.approx(1, abs=0.01)
    assert shares_of(ready, [known], [FEED], LAYERS) == {}


def test_types_that_the_file_does_not_tell_are_inferred(tmp_path: Path) -> None:
    ready, whole = written(tmp_path, tiny(SIGNATURE, BODY, WEIGHTS))
    wanted = shares_of(ready, ranges_of(whole), [FEED], LAYERS)
    for node in ready.graph:
        for value in node.outputs:
            value.type = value.shape = None
    assert shares_of(ready, ranges_of(whole), [FEED], LAYERS) == wanted


def test_activations_after_the_last_layer_keep_their_ranges(tmp_path: Path) -> None:
    """No layer smooths their errors: the best scores of a detector would all become the same."""
    body = "a = Conv(x, w0, b0)\n s = Sigmoid(a)\n y = Flatten(s)"
    x = FEED["x"].copy()
    x[::5] *= 5
    ready, whole = written(tmp_path, tiny("float[N,3,6,6] x => float[N,F] y", body, WEIGHTS), {"x": x})
    assert "a" in {one.tensor for one in ranges_of(whole)}
    assert "a_scale" not in shares_of(ready, ranges_of(whole), [{"x": x}], LAYERS)


def test_int8_narrows_ranges_and_shifts_biases_by_real_data_only(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": (64, 16), "b": (16,), "v": (16, 4), "c": (4,)}
    body = "a = Gemm(x, w, b)\n r = Relu(a)\n y = Gemm(r, v, c)"
    proto = ir.to_proto(tiny("float[N,64] x => float[N,4] y", body, weights))
    words: dict[str, Any] = {"quantize": "int8", "qdq": True, "ratio": 0, "held_out": 0, "samples": 8192}
    x = rare(1)

    def scale(**more: Any) -> float:
        made = onnxgrail.compress(proto, **{**words, **more})
        value = made.model.graph.initializers["x_scale"].const_value
        assert value is not None
        return float(value.numpy())

    def bias(**more: Any) -> Array:
        made = onnxgrail.compress(proto, **{**words, **more})
        value = made.model.graph.initializers["b_quantized"].const_value
        assert value is not None
        return value.numpy()

    narrowed, random = scale(data={"x": x}), scale()
    shifted = bias(data={"x": x})
    monkeypatch.setattr(static, "shifts_in_8_bits", lambda *_: {})
    assert np.abs(shifted - bias(data={"x": x})).max() > 0
    monkeypatch.setattr(static, "shares_of", lambda *_: {})
    assert narrowed < 0.75 * scale(data={"x": x})
    assert random == scale()


def test_biases_make_up_for_mean_errors_in_8_bits(tmp_path: Path) -> None:
    feed = {"x": (1 + np.abs(FEED["x"])).astype(np.float32)}
    ready, whole = written(tmp_path, tiny(SIGNATURE, BODY, WEIGHTS), feed)
    shifts = shifts_in_8_bits(ready, whole, [{"x": feed["x"][:4]}, {"x": feed["x"][4:]}])
    (first, second) = (node.name or "" for node in ready.graph if node.op_type == "Conv")
    assert set(shifts) == {first, second}
    assert shifts_in_8_bits(ready, whole, []) == {}

    def means() -> tuple[Array, Array]:
        """Of the first layer's outputs, which are rounded after this, in float and in 8 bits."""
        inner = next(
            node.inputs[0].name or ""
            for node in whole.graph
            if node.op_type == "QuantizeLinear" and node.inputs[0].name != "x"
        )
        found = []
        for model in (ready, whole):
            with open_session(to_bytes(model, [inner]), Setup(optimise=False)) as session:
                found.append(np.asarray(session.run(feed)[inner], np.float64).mean(axis=(0, 2, 3)))
        return found[0], found[1]

    wanted, plain = means()
    shift(whole, shifts)
    _, shifted = means()
    assert np.abs(plain - wanted).max() > 1e-3
    assert np.abs(shifted - wanted).max() < 2e-4
