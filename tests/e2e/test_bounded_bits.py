"""`max_loss` with `quantize`: the loss of the file with rounded weights is what is limited."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import onnxgrail
from onnxgrail.core import Array
from onnxgrail.errors import NothingToCompressError
from onnxgrail.finishing import finish, quantized
from onnxgrail.report.summary import search_text
from tests.command import run
from tests.shorter import shorter
from tests.tiny import tiny

from .test_max_loss import WIDTH, inputs, planted

RNG = np.random.default_rng(7)
SCALE = 0.8  # of total variation, see docs/loss.md
KINDS = ("int8", "int8-dynamic", "int8-weights", "int4", "fp16")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which no neuron can go for less than a loss of 1 %."""
    path = tmp_path_factory.mktemp("dense") / "m.onnx"
    net = onnx.load(planted(path))
    rng = np.random.default_rng(1)  # `planted` draws from numbers that depend on the order of the tests
    for place, (name, shape) in enumerate({"w1": (12, WIDTH), "w2": (WIDTH, 4)}.items()):
        array = (rng.standard_normal(shape) / (1 + 2 * place)).astype(np.float32)
        net.graph.initializer[place].CopyFrom(numpy_helper.from_array(array, name))
    onnx.save(net, path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted(tmp_path_factory.mktemp("planted") / "m.onnx")


def probabilities(path: Path, feed: Any) -> Array:
    logits = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feed)[0].astype(np.float64)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: Array = powers / powers.sum(axis=1, keepdims=True)
    return found


def lost(before: Path, after: Path, feed: Any) -> float:
    """Return the mean total variation."""
    return float(np.abs(probabilities(before, feed) - probabilities(after, feed)).sum(axis=1).mean() / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_the_written_file_is_limited_and_told(kind: str, model: Path, tmp_path: Path) -> None:
    target, judges = tmp_path / "o.onnx", inputs(80, seed=3)
    choices = {"max_loss": "5%", "minimize": "params", "selector": "obs", "round_to": 1}
    data = onnxgrail.compress(model, target, data=inputs(96), held_out=judges, quantize=kind, **choices).report.data
    written, measured = data["quantization"]["loss"], lost(model, target, judges)
    near = 0.3 if kind == "int8-dynamic" else 1e-3  # its ranges depend on the batch
    assert written["mean"] == pytest.approx(SCALE * measured, rel=near, abs=1e-6)
    assert written["mean"] <= written["bound"] <= 0.05
    assert f"at most {written['bound']:.2%}" in search_text(data)
    assert "samples that no fit has seen" in search_text(data)


def test_a_model_that_rounding_ruins_is_refused_by_its_name(dense: Path, tmp_path: Path) -> None:
    words = ("--data", tmp_path / "d.npz", "--quantize", "int4", "--max-loss", "0.5%", "--minimize", "params")
    np.savez(tmp_path / "d.npz", **inputs(96))
    done = run("compress", dense, tmp_path / "o.onnx", *words)
    assert done.exit_code == 4, done.output
    assert "nothing can go within --max-loss 0.5%: --quantize int4 alone has a loss of " in done.stderr
    assert not (tmp_path / "o.onnx").exists()


def test_all_channels_stay_where_only_rounding_holds(dense: Path, tmp_path: Path) -> None:
    target = tmp_path / "o.onnx"
    result = onnxgrail.compress(dense, target, data=inputs(96), quantize="int8-weights", max_loss="1%")
    data = result.report.data
    assert data["allocation"]["search"]["tried"][-1]["steps"] == 0
    assert all(block["kept"] == block["units"] for block in data["blocks"])
    assert target.stat().st_size < dense.stat().st_size
    assert lost(dense, target, inputs(2000, seed=1)) < 0.01
    assert "Loss: " in repr(result.report)


@pytest.mark.parametrize(
    ("cause", "choices"),
    [
        ("--quantize", {"quantize": "int8-weights", "minimize": "params"}),
        ("--minimize size", {"minimize": "size", "selector": "wanda"}),
    ],
)
def test_a_result_that_loses_more_than_was_found_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str, choices: dict[str, str]
) -> None:
    real = quantized.loss_of
    monkeypatch.setattr(quantized, "loss_of", lambda *given: dataclasses.replace(real(*given), bound=0.0123))
    with pytest.raises(NothingToCompressError, match=r"may lose up to 1\.23%, more than --max-loss 1%") as caught:
        onnxgrail.compress(model, tmp_path / "o.onnx", data=inputs(96), **choices)
    assert caught.value.hint == f"Give --max-loss 1.3% or more, or leave out {cause}"
    assert not (tmp_path / "o.onnx").exists()


@pytest.mark.parametrize("sized", [False, True])
def test_the_search_goes_on(sized: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the model that it has chosen loses too much once it is fitted to all data."""
    given: dict[str, Any] = {"max_loss": "5%", "data": inputs(96)}
    given |= {"minimize": "size"} if sized else {"minimize": "params", "quantize": "int8-weights", "round_to": 1}
    if sized:
        digits = shorter("digits_vit", tmp_path)
        model, given = digits.model, {**given, "data": digits.calibration, "samples": 64, "effort": "fast"}
    first = onnxgrail.compress(model, tmp_path / "a.onnx", **given).report.data
    real, following, calls = quantized.loss_of, finish.decided, list[Any]()

    def other(*args: Any) -> Any:
        found = real(*args)
        return found if calls else dataclasses.replace(found, bound=0.06)

    monkeypatch.setattr(quantized, "loss_of", other)
    monkeypatch.setattr(finish, "decided", lambda *args: calls.append(args) or following(*args))
    resumed = {"resume": tmp_path / "run", "force": True}
    data = onnxgrail.compress(model, tmp_path / "b.onnx", **given, **resumed).report.data
    before, after = (one["allocation"]["search"] for one in (first, data))
    assert after["key"] != before["key"]
    taken = after["tried"][after["chosen"]]
    assert taken["loss"]["bound"] <= 0.05
    assert after["cost"] == taken["cost"] > before["cost"]
    assert data["quantization"]["loss"]["bound"] <= 0.05
    assert any("so it went on" in note for note in data["notes"])
    content = (tmp_path / "b.onnx").read_bytes()
    calls.clear()
    onnxgrail.compress(model, tmp_path / "b.onnx", **given, **resumed)
    assert (tmp_path / "b.onnx").read_bytes() == content


@pytest.mark.parametrize("more", [0.001, -0.001])
def test_the_larger_loss_is_told(more: float, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few samples, fits have seen those that judge the written file, not those that judged in the search."""
    real = quantized.loss_of

    def other(*given: Any) -> Any:
        found = real(*given)
        return dataclasses.replace(found, bound=found.bound + more)

    monkeypatch.setattr(quantized, "loss_of", other)
    choices = {"minimize": "params", "max_loss": "5%", "quantize": "int8-weights"}
    data = onnxgrail.compress(model, tmp_path / "o.onnx", data=inputs(96), **choices).report.data
    search, written = data["allocation"]["search"], data["quantization"]["loss"]
    found = search["tried"][search["chosen"]]["loss"]
    text = search_text(data)
    assert f"at most {max(found['bound'], written['bound']):.2%}" in text
    assert ("that fits have seen" in text) == (written["bound"] > found["bound"])
    assert ("each judged by a fit without it" in text) == (written["bound"] <= found["bound"])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_images_hold_on_fresh_data(kind: str, tmp_path: Path) -> None:
    digits = shorter("digits_vit", tmp_path)
    with np.load(digits.calibration) as one, np.load(digits.heldout) as two:
        images = np.concatenate([one["images"], two["images"]])
    order, target = np.random.default_rng(1).permutation(len(images)), tmp_path / "o.onnx"
    data, fresh = ({"images": images[some]} for some in (order[:256], order[256:]))
    onnxgrail.compress(digits.model, target, data=data, quantize=kind, max_loss="2%", minimize="macs", effort="fast")
    assert SCALE * lost(digits.model, target, fresh) <= 0.02
    share = target.stat().st_size / digits.model.stat().st_size
    assert share < {"int8": 0.3, "int4": 0.22}[kind]  # rounding alone leaves 0.32 or 0.224


def test_layers_in_branches_are_judged_with_rounded_weights(tmp_path: Path) -> None:
    """While they are narrowed, branches lie in the main graph; ONNX Runtime gets them back as branches."""
    body = """
        left = Equal(which, zero)
        y = If (left) <
            then_branch = one () => (float[N,4,6,6] o) { a = Conv(x, v)  b = Relu(a)  o = Conv(b, w) },
            else_branch = two () => (float[N,4,6,6] p) { c = Conv(x, t)  d = Relu(c)  p = Conv(d, u) }
        >
    """
    weights = {"v": (24, 3, 1, 1), "w": (4, 24, 1, 1), "t": (24, 3, 1, 1), "u": (4, 24, 1, 1), "zero": np.array(0)}
    model = ir.to_proto(tiny("float[N,3,6,6] x, int64 which => float[N,4,6,6] y", body, weights, recorded=False))
    data = {"x": RNG.normal(size=(48, 3, 6, 6)).astype(np.float32), "which": np.array(1)}
    choices = {"quantize": "int8", "max_loss": "20%", "minimize": "params", "held_out": data}
    report = onnxgrail.compress(model, data=data, **choices).report.data
    assert report["quantization"]["loss"]["bound"] <= 0.2
    assert any(block["kept"] < block["units"] for block in report["blocks"])
