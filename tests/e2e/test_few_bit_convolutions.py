"""`--quantize int4` and `int8-weights`: weights of convolutions that a runtime converts when it loads the model."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.algebra.rounding.grid import nearest
from onnxgrail.calibration.quantize import is_quantised
from onnxgrail.calibration.runtime.session import Setup, open_session, write_optimised
from onnxgrail.core import Array, Grid
from onnxgrail.graph.bits.unpacked import convolutions, unpack
from onnxgrail.graph.cost.counting import parameters
from onnxgrail.graph.fittable.matrices import array_of, matrices, tables
from onnxgrail.graph.io.model_file import load, save
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.stored.looked_up import lookups_of
from onnxgrail.narrowing import best
from tests.oracle import killed, narrowed, narrowed_equals_masked
from tests.shorter import shorter
from tests.tiny import tiny

from .test_few_bits import goes_on

RNG = np.random.default_rng(3)
WHOLE: dict[str, Any] = {"ratio": 0, "quantize": "int4", "held_out": 0, "force": True, "check": False}
BODY = """
    a = Conv<pads = [1, 1, 1, 1]>(x, w0, b0)
    b = Relu(a)
    c = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(b, w1, b1)
    d = Relu(c)
    e = Conv<group = 32>(d, w2)
    f = Conv(e, w3)
    g = Relu(f)
    y = ConvTranspose(g, w4)
"""
WEIGHTS: dict[str, Any] = {
    "w0": (32, 3, 3, 3), "b0": (32,), "w1": (32, 32, 3, 3), "b1": (32,), "w2": (32, 1, 5, 5), "w3": (64, 32, 1, 1),
    "w4": (64, 4, 2, 2),
}  # fmt: skip
SIGNATURE = "float[N,3,16,16] x => float[N,4,5,5] y"


def images(count: int, channels: int = 3, size: int = 16, seed: int = 0) -> dict[str, Array]:
    """Smooth images, whose neighboring pixels are alike."""
    array = np.random.default_rng(seed).normal(size=(count, channels, size, size))
    for axis in (1, 2, 3):
        array = array + np.roll(array, 1, axis=axis)
    return {"x": array.astype(np.float32)}


FEED, FRESH = images(96), images(64, seed=1)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("net") / "c.onnx"
    onnx.save(ir.to_proto(tiny(SIGNATURE, BODY, WEIGHTS, recorded=False)), path)
    return path


def small(path: Path, out: str, **choices: Any) -> tuple[Path, dict[str, Any]]:
    target = path.with_name(out)
    return target, onnxgrail.compress(path, target, **{**WHOLE, "data": FEED, **choices}).report.data


def run(path: Path, feed: Any) -> Array:
    return np.asarray(ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feed)[0], np.float64)


def lost(path: Path, dense: Path, feed: Any = FRESH) -> float:
    wanted, found = run(dense, feed), run(path, feed)
    return float(np.square(found - wanted).sum() / np.square(wanted).sum())


def entries_of(report: dict[str, Any]) -> dict[str, tuple[int, int, str]]:
    return {m["weight"]: (m["bits"], m["block_size"], m["rounding"]) for m in report["quantization"]["matrices"]}


@pytest.mark.parametrize("size", [16, 24, 64])
@pytest.mark.parametrize(("opset", "ir_version"), [(9, 4), (13, 7), (21, 10)])
def test_a_runtime_reads_the_rounded_numbers(size: int, opset: int, ir_version: int, tmp_path: Path) -> None:
    body = "h = Conv(x, v)\ny = Conv<pads = [1, 1, 1, 1]>(h, w)"
    weights: dict[str, Any] = {"v": (64, 3, 1, 1), "w": (24, 64, 3, 3)}
    signature = "float[N,3,6,6] x => float[N,24,6,6] y"
    model = tiny(signature, body, weights, opset=opset, ir_version=ir_version)
    ((_, _, why), (_, matrix, none)) = convolutions(model)
    assert (bool(why), bool(none)) == (True, False)
    assert matrix is not None
    tensor = model.graph.initializers["w"].const_value
    assert tensor is not None
    found = nearest(tensor.numpy().reshape(24, -1).T, Grid(bits=4, size=size, symmetric=True))
    unpack(model.graph, matrix, found)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    name = matrix.nodes[0].inputs[1].name or "" if matrix.nodes[0].inputs[1] is not None else ""
    with open_session(to_bytes(model, outputs=[name]), Setup()) as session:
        numbers = session.run({"x": images(2, size=6)["x"]})[name]
    np.testing.assert_array_equal(numbers, found.values().T.reshape(24, 64, 3, 3).astype(np.float32))
    save(model, tmp_path / "m.onnx")
    write_optimised(tmp_path / "m.onnx", tmp_path / "o.onnx", Setup())
    ops = Counter(node.op_type for node in load((tmp_path / "o.onnx").read_bytes()).graph)
    assert ops["Conv"] == 2
    assert ops.keys() <= {"Conv", "ReorderInput", "ReorderOutput"}  # nothing is converted in a run
    assert is_quantised(model)


@pytest.mark.parametrize("body", ["y = MatMul(x, w)", "y = Gemm<transB = 1>(x, w)"])
def test_a_matrix_has_the_same_numbers(body: str) -> None:
    """For matrices whose kernel in 4 bits is slower; products may read them transposed."""
    model = tiny("float[5,48] x => float[5,40] y", body, {"w": (40, 48) if "transB" in body else (48, 40)})
    (matrix,) = set(matrices(model).values())
    found = nearest(array_of(matrix, model.graph), Grid(bits=4, size=24, symmetric=True))
    unpack(model.graph, matrix, found)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    name = matrix.nodes[0].inputs[1].name or "" if matrix.nodes[0].inputs[1] is not None else ""
    x = np.random.default_rng(0).normal(size=(5, 48)).astype(np.float32)
    with open_session(to_bytes(model, outputs=[name]), Setup()) as session:
        results = session.run({"x": x})
    numbers = results[name].T if "transB" in body else results[name]
    np.testing.assert_array_equal(numbers, found.values().astype(np.float32))
    np.testing.assert_allclose(results["y"], x @ numbers, atol=1e-4)
    assert "w" not in model.graph.initializers


def test_every_kind_has_its_bits_and_its_reason(net: Path) -> None:
    found, report = small(net, "four.onnx")
    told = {m["weight"]: m["reason"].partition(";")[0] for m in report["quantization"]["matrices"]}
    kinds = entries_of(report)
    assert {name: kind[0] for name, kind in kinds.items()} == {"w0": 8, "w1": 4, "w2": 8, "w3": 4, "w4": 8}
    assert (kinds["w1"], kinds["w3"]) == ((4, 32, "carried"), (4, 32, "carried"))
    assert told["w0"] == "the first layer keeps more bits"
    assert told["w2"] == "groups of channels keep more bits"
    assert told["w4"] == "transposed convolutions keep more bits"
    assert report["quantization"]["left"] == []
    assert found.stat().st_size < 0.35 * net.stat().st_size
    ops = Counter(node.op_type for node in onnx.load(found).graph.node)
    assert (ops["Gather"], ops["DequantizeLinear"], ops["Conv"]) == (2, 0, 4)
    assert [one.domain for one in onnx.load(found).opset_import] == [""]


def test_a_small_last_layer_has_eight_bits(tmp_path: Path) -> None:
    weights = {"w0": (64, 3, 3, 3), "w1": (128, 64, 3, 3), "w2": (8, 128, 1, 1)}
    body = "a = Conv(x, w0)\nb = Relu(a)\nc = Conv(b, w1)\nd = Relu(c)\ny = Conv(d, w2)"
    onnx.save(ir.to_proto(tiny("float[N,3,16,16] x => float[N,8,12,12] y", body, weights)), tmp_path / "h.onnx")
    _, report = small(tmp_path / "h.onnx", "h4.onnx", dry_run=True)
    assert {name: kind[0] for name, kind in entries_of(report).items()} == {"w0": 8, "w1": 4, "w2": 8}
    (why,) = (m["reason"] for m in report["quantization"]["matrices"] if m["weight"] == "w2")
    assert why.startswith("a small last layer keeps more bits")


@pytest.mark.parametrize("qdq", [False, True])
def test_eight_bits_for_all(qdq: bool, net: Path) -> None:
    found, report = small(net, "eight.onnx", quantize="int8-weights", qdq=qdq)
    assert {kind[0] for kind in entries_of(report).values()} == {8}
    assert all("when it loads" in m["reason"] for m in report["quantization"]["matrices"])
    assert lost(found, net) < 3e-4


def test_carried_errors_beat_rounding_to_nearest(net: Path) -> None:
    found, report = small(net, "carried.onnx")
    plain, alone = small(net, "nearest.onnx", data=None, held_out=None)
    assert entries_of(alone)["w1"][2] == "nearest"
    assert lost(found, net) < 0.8 * lost(plain, net)
    for entry in (m for m in report["quantization"]["matrices"] if m["bits"] == 4):
        assert entry["after"] < 0.8 * entry["before"]


@pytest.mark.parametrize("choices", [{}, {"ratio": 0.3}, {"target_size": "18%", "ratio": None}])
def test_a_dry_run_predicts_the_file(choices: dict[str, Any], net: Path) -> None:
    target, written = small(net, "dry.onnx", **choices)
    size = target.stat().st_size
    _, told = small(net, "dry.onnx", dry_run=True, **choices)
    assert told["model"]["bytes_after"] == written["model"]["bytes_after"] == size
    assert "target_size" not in choices or 0.15 * net.stat().st_size < size <= 0.18 * net.stat().st_size


def test_the_same_run_gives_the_same_bytes_also_after_a_stop(
    net: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "a = Conv(x, w0)\nb = Conv(a, w1, b1)\nc = Conv(b, w3)\nd = Conv(c, w4)\ny = Conv(d, w5)"
    weights = {"w0": (32, 3, 3, 3), "w1": (32, 32, 3, 3), "b1": (32,), "w3": (64, 32, 1, 1), "w4": (32, 64, 3, 3)}
    model = tiny("float[N,3,16,16] x => float[N,4,10,10] y", body, {**weights, "w5": (4, 32, 1, 1)})
    onnx.save(ir.to_proto(model), tmp_path / "s.onnx")
    goes_on(partial(small, tmp_path / "s.onnx", "whole.onnx"), tmp_path / "kept", monkeypatch)


def test_inputs_that_do_not_divide_into_blocks(tmp_path: Path) -> None:
    body = "a = Conv(x, w0)\nb = Conv(a, w1)\ny = Conv(b, w2)"
    weights = {"w0": (17, 3, 3, 3), "w1": (16, 17, 3, 3), "w2": (64, 16, 3, 3)}
    onnx.save(ir.to_proto(tiny("float[N,3,16,16] x => float[N,64,10,10] y", body, weights)), tmp_path / "d.onnx")
    found, report = small(tmp_path / "d.onnx", "d4.onnx")
    assert {name: kind[:2] for name, kind in entries_of(report).items()} == {
        "w0": (8, 27), "w1": (8, 153), "w2": (4, 24)
    }  # fmt: skip
    (why,) = (m["reason"] for m in report["quantization"]["matrices"] if m["weight"] == "w1")
    assert why.startswith("its inputs do not divide into even blocks of 16 or more")
    assert lost(found, tmp_path / "d.onnx") < 0.01


def test_weights_that_stay_are_named(tmp_path: Path) -> None:
    """A small weight would not get smaller; a weight of two layers has 8 bits."""
    body = "a = Conv(x, tiny)\nb = Conv(a, w)\nc = Conv(b, w)\ny = Conv(c, v)"
    weights = {"tiny": (16, 3, 1, 1), "w": (16, 16, 3, 3), "v": (4, 16, 3, 3)}
    onnx.save(ir.to_proto(tiny("float[N,3,16,16] x => float[N,4,10,10] y", body, weights)), tmp_path / "t.onnx")
    _, report = small(tmp_path / "t.onnx", "t4.onnx")
    (left,) = (one for one in report["quantization"]["left"] if one["value"] == "tiny")
    assert left["reason"] == "it would not get smaller"
    (why,) = (m["reason"] for m in report["quantization"]["matrices"] if m["weight"] == "w")
    assert why.startswith("its weight is no initializer that it alone reads")


@pytest.mark.parametrize("name", ["w0", "w1"])
def test_what_is_not_finite_is_named(name: str, net: Path, tmp_path: Path) -> None:
    model = onnx.load(net)
    (tensor,) = (one for one in model.graph.initializer if one.name == name)
    array = onnx.numpy_helper.to_array(tensor).copy()
    array.flat[5] = np.inf
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "n.onnx")
    with pytest.raises(onnxgrail.OnnxGrailError, match=f"the weight {name} holds NaN or infinity"):
        small(tmp_path / "n.onnx", "n4.onnx", data=None, held_out=None)


def test_numbers_along_a_row_of_pixels_are_no_bias(tmp_path: Path) -> None:
    """As many as there are channels are added along the last axis, not to the channels."""
    body = (
        "a = Conv<pads = [1, 1, 1, 1]>(x, w0)\nb = Conv<pads = [1, 1, 1, 1]>(a, w1)\nc = Add(b, row)\ny = Conv(c, w3)"
    )
    row, feed = 50 * np.arange(32, dtype=np.float32), images(24, size=32)
    weights = {"w0": (32, 3, 3, 3), "w1": (32, 32, 3, 3), "row": row, "w3": (64, 32, 1, 1)}
    onnx.save(ir.to_proto(tiny("float[N,3,32,32] x => float[N,64,32,32] y", body, weights)), tmp_path / "r.onnx")
    found, report = small(tmp_path / "r.onnx", "r4.onnx", data=feed)
    (entry,) = (m for m in report["quantization"]["matrices"] if m["weight"] == "w1")
    assert entry["rounding"] == "carried"
    assert entry["after"] < 0.01
    assert lost(found, tmp_path / "r.onnx", feed) < 0.01


def test_a_size_gives_convolutions_four_bits_before_fewer_channels(tmp_path: Path) -> None:
    """At 20 % of the bytes, 8 bits in all layers are not enough; 4 bits in some lose less than fewer channels."""
    digits, target = shorter("digits_resnet", tmp_path), tmp_path / "s.onnx"
    given = {"data": digits.calibration, "target_size": "20%", "samples": 128, "check": False}
    report = onnxgrail.compress(digits.model, target, **given).report.data
    assert target.stat().st_size == report["model"]["bytes_after"] <= 0.2 * digits.model.stat().st_size
    assert all(block["kept"] == block["units"] for block in report["blocks"])
    bits = report["allocation"]["bits"]
    assert {name: few for name, few in bits.items() if few < 32} == {
        m["weight"]: m["bits"] for m in report["quantization"]["matrices"]
    }
    assert {4, 8} <= set(bits.values())
    with np.load(digits.heldout) as held:
        feed = {"images": held["images"]}
    assert lost(target, digits.model, feed) < 1e-3


@pytest.mark.parametrize("kind", ["int4", "int8-weights"])
def test_openvino_runs_it(kind: str, tmp_path: Path) -> None:
    """By default, it rounds inputs of such layers to 8 bits: 1e-5 of the energy here."""
    openvino = pytest.importorskip("openvino")
    digits, found = shorter("digits_resnet", tmp_path), tmp_path / "d.onnx"
    onnxgrail.compress(digits.model, found, **{**WHOLE, "data": digits.calibration, "samples": 64, "quantize": kind})
    with np.load(digits.heldout) as held:
        feed = {"images": held["images"][:32]}
    compiled = openvino.Core().compile_model(str(found), "CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})
    wanted = run(found, feed)
    assert np.square(compiled(feed)[0] - wanted).sum() < 1e-10 * np.square(wanted).sum()


def test_a_quantized_file_is_not_quantized_again(net: Path) -> None:
    found, _ = small(net, "again.onnx")
    with pytest.raises(onnxgrail.OnnxGrailError, match="is quantized already"):
        small(found, "twice.onnx")


def test_a_written_file_is_narrowed_again_and_keeps_its_bits(net: Path, tmp_path: Path) -> None:
    """Twice: bytes whose block lost neighbors name it, and are cut like others."""
    found, _ = small(net, "once.onnx")
    model = load(found.read_bytes())
    assert tables(model) == []  # the pairs in a byte are no embedding
    for seed in range(2):
        survey = narrowed_equals_masked(model, FEED, seed=seed)
        assert {block.units for block in survey.blocks} <= {8, 16, 32, 64}
        model = narrowed(model, survey, killed(survey, 0.5))
        assert sum(lookups_of(node) is not None for node in model.graph) == 2
    target = tmp_path / "slim.onnx"
    report = onnxgrail.compress(found, target, data=FEED, unit_ratio=0.5, check=False, held_out=0).report.data
    assert target.stat().st_size == report["model"]["bytes_after"] < 0.75 * found.stat().st_size
    assert report["model"]["params_after"] == parameters(load(target.read_bytes()))
    assert lost(target, found) < 0.3


@pytest.mark.parametrize(
    ("name", "choices"), [("digits_resnet", {}), ("digits_vit", {}), ("digits_vit", {"qdq": True})]
)
def test_fitted_weights_of_a_quantized_file_are_rounded_with_carried_errors(
    name: str, choices: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As lookups, MatMulNBits and DequantizeLinear. Without errors carried on, numbers are rounded to nearest."""
    embedded, source = shorter(name, tmp_path), tmp_path / "q.onnx"
    proto = onnx.version_converter.convert_version(onnx.load(embedded.model), 21)
    onnx.save(proto, tmp_path / "m.onnx")
    given: dict[str, Any] = {**WHOLE, "data": embedded.calibration, "samples": 128}
    onnxgrail.compress(tmp_path / "m.onnx", source, **given, block_size=16, **choices)
    given |= {"quantize": "none", "ratio": None, "unit_ratio": 0.1, "blocks": ("conv", "mlp")}
    report = onnxgrail.compress(source, tmp_path / "carried.onnx", **given).report.data
    assert any(layer["alpha"] is not None for layer in report["refits"])
    monkeypatch.setattr(best, "again", lambda prepared, task, folds, ledger, before, start: (ledger, ""))
    onnxgrail.compress(source, tmp_path / "nearest.onnx", **given)
    with np.load(embedded.heldout) as held:
        feed = {key: held[key][:200] for key in held.files if key != "labels"}
    carried, plain = (lost(tmp_path / file, source, feed) for file in ("carried.onnx", "nearest.onnx"))
    assert carried < 0.97 * plain
    assert is_quantised(load((tmp_path / "carried.onnx").read_bytes()))


@pytest.mark.parametrize(("name", "share"), [("digits_resnet", 0.18), ("digits_vit", 0.22)])
def test_four_bits_lose_at_most_one_held_out_image(name: str, share: float, tmp_path: Path) -> None:
    digits, target = models.load(name), tmp_path / "d4.onnx"
    report = onnxgrail.compress(digits.model, target, **{**WHOLE, "data": digits.calibration}).report.data
    with np.load(digits.heldout) as held:
        feed, labels = {"images": held["images"]}, held["labels"]
    before, after = (int((run(path, feed).argmax(axis=1) == labels).sum()) for path in (Path(digits.model), target))
    assert len(labels) == 400
    assert after >= before - 1
    assert target.stat().st_size < share * Path(digits.model).stat().st_size
    entries = report["quantization"]["matrices"]
    assert sum(entry["bits"] == 4 for entry in entries) >= len(entries) - 2
    assert all(entry["after"] < 0.65 * entry["before"] for entry in entries if entry["bits"] == 4)
