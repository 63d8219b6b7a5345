"""`--target-size` and `--minimize size` decide widths of blocks and bits of weights together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import onnxgrail
from onnxgrail import models
from onnxgrail.allocation import choose, outcome
from onnxgrail.calibration.observe import observe
from onnxgrail.core import Recipe
from onnxgrail.errors import NothingToCompressError, UsageError
from onnxgrail.graph.bits.plan import SPARED, plan_of
from onnxgrail.graph.rotate.marked import SECOND
from onnxgrail.narrowing.bits import measuring
from onnxgrail.narrowing.bits.rounding import CODED
from onnxgrail.options import KINDS
from tests.shorter import shorter
from tests.tiny import feed, tiny

from . import nets
from .rounded import ROWS, lost
from .test_few_bits import goes_on

RESNET = models.load("digits_resnet")  # for its data
DENSE = 0.995  # accuracy of the shorter ResNet
FEED = {"x": ROWS[:256]}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("budget") / "m.onnx"
    onnx.save(nets.mlp((24, 192, 128, 10)), path)
    return path


def small(path: Path, out: str, **choices: Any) -> tuple[Path, dict[str, Any]]:
    target = path.with_name(out)
    given = {"data": FEED, "held_out": 32, "force": True, **choices}
    return target, onnxgrail.compress(path, target, **given).report.data


def narrowed(report: dict[str, Any]) -> int:
    return sum(block["kept"] < block["units"] for block in report["blocks"])


@pytest.mark.parametrize("share", [0.25, 0.12])
def test_a_size_is_met_with_fewer_bits_before_fewer_channels(wide: Path, share: float) -> None:
    found, report = small(wide, "both.onnx", target_size=f"{share:%}")
    narrow, alone = small(wide, "widths.onnx", target_size=f"{share:%}", only_widths=True)
    limit = share * wide.stat().st_size
    assert found.stat().st_size <= limit
    assert narrow.stat().st_size <= limit
    assert alone["allocation"]["bits"] == {}
    assert alone["quantization"] is None
    assert lost(found, wide) < 0.5 * lost(narrow, wide)
    bits = report["allocation"]["bits"]
    assert bits == {m["weight"]: m["bits"] for m in report["quantization"]["matrices"]} | {
        weight: 32 for weight, one in bits.items() if one == 32
    }
    assert narrowed(report) < narrowed(alone) or share < 0.15
    assert max(m["block_size"] for m in report["quantization"]["matrices"]) == (128 if share < 0.15 else 32)


@pytest.mark.parametrize(
    ("size", "choices"),
    [("24%", {}), ("12%", {"samples": 200}), ("24%", {"only_bits": True}), ("20%", {"quantize": "int8-weights"})],
)
def test_a_dry_run_predicts_the_file(wide: Path, size: str, choices: dict[str, Any]) -> None:
    target, written = small(wide, "dry.onnx", target_size=size, **choices)
    taken = target.stat().st_size
    target.unlink()
    _, told = small(wide, "dry.onnx", target_size=size, dry_run=True, **choices)
    assert not target.exists()
    assert told["model"]["bytes_after"] == written["model"]["bytes_after"] == taken
    assert taken <= written["model"]["budget"]["limit"]


def test_a_convolution_becomes_two_in_few_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both parts have the bits that were chosen for one, and lose less than narrower blocks do; that is compared."""
    resnet, kinds = models.load("digits_resnet"), tuple(kind for kind in KINDS if kind != "rank")
    lost, ways = list[float](), list[int]()
    real = measuring.together_near

    def counted(*given: Any) -> Any:
        found = real(*given)
        ways.append(len(found))
        return found

    monkeypatch.setattr(measuring, "together_near", counted)
    for number, blocks in enumerate((KINDS, kinds)):
        out = tmp_path / f"{number}.onnx"
        given: dict[str, Any] = {"data": resnet.calibration, "samples": 64, "held_out": resnet.heldout}
        result = onnxgrail.compress(resnet.model, out, target_size="12%", blocks=blocks, **given)
        assert 0.119 < out.stat().st_size / resnet.model.stat().st_size <= 0.12
        report = result.report.data
        (output,) = report["quantization"]["outputs"]
        lost.append(output["nmse"])
        bits = {m["weight"].split("/narrowed")[0]: m["bits"] for m in report["quantization"]["matrices"]}
        seconds = [name for name in bits if name.endswith(SECOND)]
        assert bool(seconds) == ("rank" in blocks)
        assert all(bits[name] >= bits[name.removesuffix(SECOND)] for name in seconds)
        assert not any(name.endswith(SECOND) for name in report["allocation"]["bits"])
    assert lost[0] < 0.5 * lost[1]
    assert ways == [3, 2]


def test_declared_shapes_of_weights_count(tmp_path: Path) -> None:
    """The embedded Llama declares them; they leave the file only if a runtime converts weights."""
    llama, target = shorter("char_llama", tmp_path), tmp_path / "l.onnx"
    given: dict[str, Any] = {"data": llama.calibration, "samples": 4, "held_out": 0, "check": False}
    report = onnxgrail.compress(llama.model, target, target_size="17%", only_bits=True, **given).report.data
    assert target.stat().st_size <= report["model"]["budget"]["limit"]
    assert not any("missed" in note for note in report["notes"])


@pytest.mark.parametrize("allocate", ["auto", "flap"])
def test_bits_alone_remove_nothing(wide: Path, allocate: str) -> None:
    _, report = small(wide, "bits.onnx", target_size="25%", only_bits=True, allocate=allocate)
    assert narrowed(report) == 0
    assert report["model"]["params_after"] == report["model"]["params_before"]
    with pytest.raises(UsageError, match=r"--target-size 8% is out of reach: with 3 weights in as few bits") as caught:
        small(wide, "no.onnx", target_size="8%", only_bits=True)
    assert "Leave out --only-bits" in str(caught.value.hint)


def test_a_refusal_tells_the_bytes_of_the_file(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow blocks may add bytes that were not counted: padding, names."""
    real = choose.built

    def larger(prepared: Any, recipe: Any, metric: Any, widths: Any, *bits: Any) -> float:
        return (real(prepared, recipe, metric, widths, *bits) or 0.0) + 5000 * (max(widths.values()) < 150)

    for module in (choose, outcome):
        monkeypatch.setattr(module, "built", larger)
    with pytest.raises(UsageError, match=r"--target-size 4% is out of reach: ") as caught:
        small(wide, "no.onnx", target_size="4%")
    left = str(caught.value).partition("they may have ")[2].split()[0].replace(",", "")
    assert int(left) > 0.04 * wide.stat().st_size


@pytest.mark.parametrize(("kind", "bits"), [("int4", 4), ("int8-weights", 8)])
def test_a_size_counts_the_bits_that_were_asked_for(wide: Path, kind: str, bits: int) -> None:
    found, report = small(wide, "asked.onnx", target_size="20%", quantize=kind)
    limit = 0.2 * wide.stat().st_size
    assert 0.9 * limit < found.stat().st_size <= limit or narrowed(report) == 0
    assert {m["bits"] for m in report["quantization"]["matrices"]} == {bits}
    assert (narrowed(report) > 0) == (kind == "int8-weights")


def test_a_loss_limits_bits_and_widths_together(wide: Path) -> None:
    choices: dict[str, Any] = {"max_loss": "2%", "minimize": "size", "held_out": 64}
    found, report = small(wide, "loss.onnx", **choices)
    narrow, _ = small(wide, "narrow.onnx", only_widths=True, **choices)
    assert found.stat().st_size < 0.5 * narrow.stat().st_size
    search = report["allocation"]["search"]
    chosen = search["tried"][search["chosen"]]
    assert chosen["loss"]["bound"] <= 0.02
    assert chosen["cost"] == pytest.approx(found.stat().st_size, rel=0.1)
    assert set(report["allocation"]["bits"].values()) <= {4, 8, 16, 32}
    assert not any("the loss was measured before" in note for note in report["notes"])


def images(path: Path, out: str, **choices: Any) -> tuple[Path, dict[str, Any]]:
    given = {"data": RESNET.calibration, "compensate": "grail", "force": True, **choices}
    return path / out, onnxgrail.compress(shorter("digits_resnet", path).model, path / out, **given).report.data


def right(path: Path) -> float:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return models.score(RESNET, lambda feed: session.run(None, feed))


def test_convolutions_get_fewer_bits_before_fewer_channels(tmp_path: Path) -> None:
    found, report = images(tmp_path, "both.onnx", target_size="30%")
    narrow, _ = images(tmp_path, "widths.onnx", target_size="30%", only_widths=True)
    limit = 0.3 * (model := shorter("digits_resnet", tmp_path).model).stat().st_size
    assert found.stat().st_size == report["model"]["bytes_after"] <= limit
    assert narrow.stat().st_size <= limit
    assert right(found) >= DENSE - 0.0025
    few, wide = (onnxgrail.compare(model, one, data=RESNET.heldout).outputs[0] for one in (found, narrow))
    assert few.nmse < 0.1 * wide.nmse
    assert narrowed(report) == 0
    bits = {name: few for name, few in report["allocation"]["bits"].items() if few < 32}
    assert {8, 16} <= set(bits.values())
    entries = report["quantization"]["matrices"]
    assert {one["weight"]: one["bits"] for one in entries} == bits
    assert {one["reason"] for one in entries if "conv" in one["weight"] and one["bits"] > 4} == {CODED}
    left = {one["value"]: one["reason"] for one in report["quantization"]["left"]}
    assert left.keys() == report["allocation"]["bits"].keys() - bits.keys()
    assert set(left.values()) <= {SPARED}
    kept = {tensor.name: tensor.data_type for tensor in onnx.load(found).graph.initializer}
    assert {kept[f"{name}/8"] for name, few in bits.items() if few == 8} == {TensorProto.INT8}
    assert {kept[f"{name}/16"] for name, few in bits.items() if few == 16} == {TensorProto.FLOAT16}


def test_a_dry_run_predicts_a_file_of_convolutions(tmp_path: Path) -> None:
    target, written = images(tmp_path, "dry.onnx", target_size="13%", samples=24)
    taken = target.read_bytes()
    target.unlink()
    _, told = images(tmp_path, "dry.onnx", target_size="13%", samples=24, dry_run=True)
    assert not target.exists()
    assert told["model"]["bytes_after"] == written["model"]["bytes_after"] == len(taken)
    assert narrowed(written) > 0
    assert len(taken) <= written["model"]["budget"]["limit"]
    images(tmp_path, "dry.onnx", target_size="13%", samples=24)
    assert target.read_bytes() == taken


def test_matrices_have_16_bits_between_8_and_all(wide: Path) -> None:
    found, report = small(wide, "half.onnx", target_size="42%")
    bits = report["allocation"]["bits"]
    halves = {name for name, few in bits.items() if few == 16}
    kept = {tensor.name: tensor.data_type for tensor in onnx.load(found).graph.initializer}
    assert halves
    assert {kept[f"{name}/16"] for name in halves} == {TensorProto.FLOAT16}
    assert {m["weight"] for m in report["quantization"]["matrices"]} == {n for n, few in bits.items() if few < 32}
    assert found.stat().st_size == report["model"]["bytes_after"] <= 0.42 * wide.stat().st_size
    assert lost(found, wide) < 0.01
    again, _ = small(wide, "again.onnx", widths={}, bits=bits)
    assert lost(again, found) == 0.0


def test_a_small_loss_leaves_widths_if_bits_alone_cost_less(tmp_path: Path) -> None:
    sizes, vit = [], shorter("digits_vit", tmp_path)
    for only in ({}, {"only_bits": True}):
        given = {"data": vit.calibration, "samples": 64, "held_out": vit.heldout, "minimize": "size", "effort": "fast"}
        report = onnxgrail.compress(vit.model, None, max_loss="0.1%", dry_run=True, **given, **only).report.data
        sizes.append(report["model"]["bytes_after"])
    assert sizes[0] <= 1.05 * sizes[1]


@pytest.mark.parametrize("only", [{}, {"only_bits": True}])
def test_a_loss_decides_bits_of_convolutions(only: dict[str, Any], tmp_path: Path) -> None:
    target, report = images(tmp_path, "l.onnx", max_loss="1%", minimize="size", samples=96, **only)
    search = report["allocation"]["search"]
    assert search["tried"][search["chosen"]]["loss"]["bound"] <= 0.01
    assert target.stat().st_size < (0.3 if only else 0.2) * (tmp_path / "short_digits_resnet.onnx").stat().st_size
    assert right(target) >= 0.97
    assert (narrowed(report) > 0) != bool(only)


@pytest.mark.parametrize("size", ["29%", "30%", "33%", "38%"])
def test_biases_that_make_up_for_rounding_count(size: str, tmp_path: Path) -> None:
    weights = {"u": (64, 3, 3, 3), "v": (64, 32, 3, 3), "w": (64, 8, 2, 2)}
    body = (
        "a = Conv(x, u)\nb = Relu(a)\nc = Conv<group = 2>(b, v)\nd = Relu(c)\ny = ConvTranspose <group: int = 4> (d, w)"
    )
    onnx.save(ir.to_proto(tiny("float[N,3,8,8] x => float[N,32,5,5] y", body, weights)), tmp_path / "m.onnx")
    data = {"x": np.random.default_rng(0).normal(size=(32, 3, 8, 8)).astype(np.float32)}
    given: dict[str, Any] = {"data": data, "compensate": "grail", "held_out": 0}
    report = onnxgrail.compress(tmp_path / "m.onnx", tmp_path / "o.onnx", target_size=size, **given).report.data
    kept = {tensor.name for tensor in onnx.load(tmp_path / "o.onnx").graph.initializer}
    assert {"u/b", "v/b", "w/b"} & kept
    assert (tmp_path / "o.onnx").stat().st_size == report["model"]["bytes_after"] <= report["model"]["budget"]["limit"]


def test_few_bytes_of_weights_keep_their_bits(tmp_path: Path) -> None:
    weights = {"v": (32, 3, 3, 3), "w": (4, 32, 3, 3), "map": (4, 116, 116)}
    body = "a = Conv(x, v)\nb = Relu(a)\nc = Conv(b, w)\ny = Add(c, map)"
    onnx.save(ir.to_proto(tiny("float[N,3,120,120] x => float[N,4,116,116] y", body, weights)), tmp_path / "m.onnx")
    given = {"data": {"x": np.random.default_rng(0).normal(size=(8, 3, 120, 120)).astype(np.float32)}, "check": False}
    report = onnxgrail.compress(tmp_path / "m.onnx", tmp_path / "o.onnx", target_size="98.5%", **given).report.data
    assert report["quantization"] is None
    assert any("weights keep their bits: few bytes" in note for note in report["notes"])
    with pytest.raises(NothingToCompressError, match="weights keep their bits: few bytes of this model"):
        onnxgrail.compress(tmp_path / "m.onnx", tmp_path / "p.onnx", target_size="98.5%", only_bits=True, **given)


@pytest.mark.parametrize("size", [0.3, 0.14])
def test_weights_in_constant_nodes_get_fewer_bits(size: float, tmp_path: Path) -> None:
    model = onnx.load(shorter("digits_resnet", tmp_path).model)
    for tensor in list(model.graph.initializer):
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    del model.graph.initializer[:]
    onnx.save(model, tmp_path / "m.onnx")
    given = {"data": RESNET.calibration, "samples": 32, "compensate": "grail"}
    report = onnxgrail.compress(tmp_path / "m.onnx", tmp_path / "o.onnx", target_size=f"{size:%}", **given).report.data
    assert (tmp_path / "o.onnx").stat().st_size <= report["model"]["budget"]["limit"]
    assert bool(narrowed(report)) == (size < 0.2)
    entries, bits = report["quantization"]["matrices"], report["allocation"]["bits"]
    assert {one["weight"].split("/narrowed")[0]: one["bits"] for one in entries} == {
        name: few for name, few in bits.items() if few < 32
    }
    assert right(tmp_path / "o.onnx") >= DENSE - 0.02


@pytest.mark.parametrize(("opset", "size"), [(17, 0.22), (21, 0.2)])
def test_a_size_is_met_with_standard_operators(opset: int, size: float, tmp_path: Path) -> None:
    model = nets.mlp((24, 192, 128, 10))
    model.opset_import[0].version = opset
    onnx.save(model, tmp_path / "m.onnx")
    found, report = small(tmp_path / "m.onnx", "q.onnx", target_size=f"{size:%}", qdq=True, effort="fast")
    assert found.stat().st_size == report["model"]["bytes_after"] <= report["model"]["budget"]["limit"]
    assert {entry.domain for entry in onnx.load(found).opset_import} == {""}


def test_a_weight_of_16_bits_is_no_matrix_in_blocks() -> None:
    """A narrowed weight can have the form of such a matrix where the whole weight has not."""
    model = tiny("float[N,80] x => float[N,20] y", "y = MatMul(x, w)", {"w": (80, 20)})
    facts = observe(model, feed(model))
    assert len(plan_of(model, facts, Recipe(), {"w": 8}).matrices) == 1
    assert not plan_of(model, facts, Recipe(), {"w": 16}).matrices
    assert not plan_of(model, facts, Recipe(), {"conv": 16}).matrices


def test_the_size_is_that_of_the_file_that_a_tool_quantizes(wide: Path) -> None:
    found, report = small(wide, "tool.onnx", target_size="30%", quantize="fp16", check=False)
    assert 0.95 < found.stat().st_size / report["model"]["budget"]["limit"] <= 1
    assert report["allocation"]["bits"] == {}


def test_without_data_the_largest_weights_lose_bits_first(wide: Path) -> None:
    _, report = small(wide, "blind.onnx", target_size="40%", data=None, held_out=None)
    bits = report["allocation"]["bits"]
    assert narrowed(report) == 0
    assert bits["w1"] == 8
    assert bits["w2"] == 32


def test_the_same_run_gives_the_same_bytes_also_after_a_stop(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = partial(small, wide, "whole.onnx", target_size="12%", samples=200)
    goes_on(make, tmp_path / "kept", monkeypatch)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"only_bits": True, "only_widths": True, "target_size": "25%"}, "--only-bits and --only-widths exclude"),
        ({"only_bits": True, "ratio": 0.3}, "--only-bits needs an amount of bytes"),
        ({"only_bits": True}, "--only-bits needs an amount of bytes"),
        ({"only_widths": True, "target_params": "50%"}, "--only-widths needs an amount of bytes"),
        ({"only_bits": True, "quantize": "int4", "target_size": "25%"}, "--only-bits and --quantize int4 exclude"),
        ({"only_widths": True, "quantize": "int4", "target_size": "25%"}, "--only-widths and --quantize int4 exclude"),
    ],
)
def test_contradictions(wide: Path, choices: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        small(wide, "no.onnx", **choices)
