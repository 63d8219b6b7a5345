"""After narrowing: quantise, simplify, hold against a runtime; on a trained ResNet, whose accuracy is known."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.quantize import Quantised
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.calibration.runtime.timing import Times
from onnxgrail.core import Feed, Recipe
from onnxgrail.errors import MissingExtraError, ModelError, UsageError
from onnxgrail.finishing import by_tool, ship
from onnxgrail.models import score
from tests.command import run, said
from tests.shorter import shorter
from tests.tiny import tiny

from . import nets

KINDS = ("int8", "int8-dynamic", "fp16")


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return shorter("digits_resnet", tmp_path_factory.mktemp("resnet"))


def accuracy(embedded: Any, path: Path) -> float:
    with open_session(path) as session:

        def outputs(feed: Feed) -> list[Any]:
            return list(session.run(feed).values())

        return float(score(embedded, outputs))


def kinds_of(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("kind", KINDS)
def test_narrow_then_quantise_then_compare(kind: str, resnet: Any, tmp_path: Path) -> None:
    output, report = tmp_path / "o.onnx", tmp_path / "r.json"
    words = (
        "compress",
        resnet.model,
        output,
        "--unit-ratio=0.3",
        "--data",
        resnet.calibration,
        "--quantize",
        kind,
        "--report",
        report,
    )
    result = run(*words)
    assert result.exit_code == 0, result.output
    data = json.loads(report.read_text())
    entry = data["quantization"]
    for text in (f"Quantized to {kind}:", "Output logits, quantized: margin", "Latency of one run: original"):
        assert text in result.stdout
    assert entry["headline"]["measure"] == "top-1 agreement"
    assert f"output logits on {entry['judged']['samples']} held-out samples" in result.stdout
    assert set(entry["latency_ms"]) == {"original", "narrowed", "quantized"}
    assert entry["outputs"][0]["cosine"] > 0.99
    assert entry["to_narrowed"][0]["cosine"] > max(0.999, entry["outputs"][0]["cosine"] - 1e-4)
    assert data["model"]["bytes_after"] == output.stat().st_size
    assert entry["bytes_after"] <= entry["bytes_before"] * (0.4 if kind == "int8" else 0.6 if kind == "fp16" else 1)
    assert data["model"]["params_after"] < 0.6 * data["model"]["params_before"]
    compared = run("compare", resnet.model, output, "--data", resnet.calibration, "--min-cosine", 0.99)
    assert compared.exit_code == 0, compared.output
    assert f"{data['model']['params_after']:,}" in compared.output  # scales do not count, as where they were made
    assert accuracy(resnet, output) > 0.98
    assert {p.key for p in onnx.load(output).metadata_props} == {"onnxgrail.recipe"}
    ports = [(v.name, v.type.tensor_type.elem_type) for v in onnx.load(output).graph.input]
    assert ports == [(v.name, v.type.tensor_type.elem_type) for v in onnx.load(resnet.model).graph.input]


def test_what_each_kind_writes(resnet: Any, tmp_path: Path) -> None:
    def written(kind: str, **choices: Any) -> Path:
        path = tmp_path / f"{kind}{len(choices)}.onnx"
        common = {"data": resnet.calibration, "unit_ratio": 0.3, "samples": 32, "compensate": "none", "check": False}
        onnxgrail.compress(resnet.model, path, quantize=kind, **common, **choices)
        return path

    static = onnx.load(written("int8", qdq=True, seed=0))
    types = {t.name: t.data_type for t in static.graph.initializer}
    assert types["stem.0.weight_quantized"] == onnx.TensorProto.INT8
    assert onnx.TensorProto.UINT8 in types.values()  # zero points of activations
    symmetric = onnx.load(written("int8", target="tensorrt"))
    assert onnx.TensorProto.UINT8 not in {t.data_type for t in symmetric.graph.initializer}
    assert "MatMulInteger" in kinds_of(written("int8-dynamic"))
    half = onnx.load(written("fp16"))
    assert {t.data_type for t in half.graph.initializer} == {onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64}


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_model_is_not_quantised_again(kind: str, resnet: Any, tmp_path: Path) -> None:
    common: dict[str, Any] = {"data": resnet.calibration, "unit_ratio": 0.3, "samples": 16, "compensate": "none"}
    onnxgrail.compress(resnet.model, tmp_path / "q.onnx", quantize=kind, check=False, **common)
    with pytest.raises(ModelError, match="already"):
        onnxgrail.compress(tmp_path / "q.onnx", quantize=kind, **common)
    result = run("compress", tmp_path / "q.onnx", "--unit-ratio=0.3", "--quantize", kind, "--data", resnet.calibration)
    assert result.exit_code == 1
    assert said(result.stderr).count("\n") == 1
    assert not (tmp_path / "q.compressed.onnx").exists()


@pytest.mark.parametrize("kind", ["int8", "int8-dynamic"])
def test_half_precision_is_not_made_integers(kind: str, resnet: Any, tmp_path: Path) -> None:
    """ONNX Runtime's tools would leave the weights, round activations, and make the file larger; or write one that
    does not load."""
    common: dict[str, Any] = {"data": resnet.calibration, "unit_ratio": 0.3, "samples": 16, "compensate": "none"}
    onnxgrail.compress(resnet.model, tmp_path / "h.onnx", quantize="fp16", check=False, **common)
    with pytest.raises(ModelError, match="has half precision already"):
        onnxgrail.compress(tmp_path / "h.onnx", quantize=kind, dry_run=True, **common)
    again = onnxgrail.compress(tmp_path / "h.onnx", dry_run=True, **{**common, "unit_ratio": 0.5})
    assert again.report.data["model"]["params_after"] < 0.8 * again.report.data["model"]["params_before"]


def test_a_file_that_hardly_shrinks_is_told(resnet: Any) -> None:
    words: dict[str, Any] = {
        "data": resnet.calibration,
        "unit_ratio": 0.3,
        "samples": 16,
        "compensate": "none",
        "dry_run": True,
    }
    for kind, told in (("int8-dynamic", True), ("fp16", False)):
        notes = onnxgrail.compress(resnet.model, quantize=kind, check=False, **words).report.data["notes"]
        assert any("convolutions stay in float" in note for note in notes) == told, notes
    report = onnxgrail.compress(
        nets.mlp(), data=nets.vectors(), dry_run=True, quantize="int8", qdq=True, unit_ratio=0.3, check=False
    ).report
    notes = report.data["notes"]
    assert any("few of its bytes are weights of layers" in note for note in notes), notes
    doubles = {name: np.random.default_rng(0).normal(size=size) for name, size in (("w", (32, 96)), ("v", (96, 8)))}
    wide = tiny("double[N,32] x => double[N,8] y", "a = MatMul(x, w)\nb = Relu(a)\ny = MatMul(b, v)", doubles)
    notes = onnxgrail.compress(wide, dry_run=True, quantize="int8-dynamic", ratio=0).report.data["notes"]
    assert any("most of its weights are of a kind or type that keeps its numbers" in note for note in notes), notes


def test_gate_holds_the_quantised_file(resnet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of next to nothing ruin the model, and the gate sees the file and not the narrowed model."""
    from onnxgrail.calibration.quantize import form
    from onnxgrail.calibration.quantize.static import Static

    real = form.quantise

    def ruined(model: Any, kind: str, *, given: Static, **options: Any) -> Any:
        feeds = [{k: v * 1e-3 for k, v in feed.items()} for feed in given.feeds]
        return real(model, kind, given=Static(feeds=feeds), **options)

    monkeypatch.setattr(form, "quantise", ruined)
    words = (
        "compress",
        resnet.model,
        tmp_path / "o.onnx",
        "--unit-ratio=0.3",
        "--data",
        resnet.calibration,
        "--quantize",
        "int8",
        "--allocate=uniform",
    )
    result = run(*words, "--min-cosine", 0.97)
    assert result.exit_code == 3, result.stderr
    assert "is below --min-cosine 0.97" in result.stderr
    assert (tmp_path / "o.onnx").exists()


def test_layers_that_read_outliers_stay_in_float(tmp_path: Path) -> None:
    feed = nets.vectors(512)
    odd = {"x": feed["x"].copy()}
    odd["x"][0, 0] = 3e3  # one value so large that a step is wider than all others
    words = {"quantize": "int8", "qdq": True, "unit_ratio": 0, "check": False}
    plain = onnxgrail.compress(nets.mlp(), data=feed, dry_run=True, **words).report.data["quantization"]
    found = onnxgrail.compress(nets.mlp(), data=odd, dry_run=True, **words).report.data["quantization"]
    assert plain["kept_float"] == []
    assert found["kept_float"]


def test_a_model_that_folds_to_constants_has_nothing_to_quantise(tmp_path: Path) -> None:
    body = "a = Relu(v)\ny = MatMul(a, w)"
    onnx.save(ir.to_proto(tiny("float[N,6] x => float[4,8] y", body, {"v": (4, 6), "w": (6, 8)})), tmp_path / "m.onnx")
    found = run("compress", tmp_path / "m.onnx", "--ratio", "0", "--quantize", "int8")
    assert found.exit_code == 4
    assert "--quantize int8: the outputs do not depend on the inputs" in said(found.stderr)


def test_what_cannot_be_quantised(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="quantize has no 'int3'"):
        onnxgrail.compress(nets.mlp(), data=nets.vectors(), quantize="int3", unit_ratio=0.3)
    with pytest.raises(UsageError, match="--strict needs --target"):
        onnxgrail.compress(nets.mlp(), data=nets.vectors(), strict=True, unit_ratio=0.3)


# ------------------------------------------------------------------------------------------------------------ simplify


def test_simplify_without_onnxslim(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "onnxslim" else real(name))
    with pytest.raises(MissingExtraError, match=r"onnxgrail\[simplify\]"):
        onnxgrail.compress(nets.mlp(), data=nets.vectors(), simplify=True, unit_ratio=0.3)


def test_a_simplified_graph_that_does_not_load_is_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    onnxslim = pytest.importorskip("onnxslim", reason="extra `simplify` is not installed")

    def broken(model: onnx.ModelProto, **_: Any) -> onnx.ModelProto:
        del model.graph.node[0]
        return model

    monkeypatch.setattr(onnxslim, "slim", broken)
    with pytest.raises(ModelError, match=r"--simplify: onnxslim failed: .* Leave out --simplify"):
        onnxgrail.compress(nets.mlp(), tmp_path / "o.onnx", data=nets.vectors(), simplify=True, unit_ratio=0.3)
    assert not list(tmp_path.iterdir())


def test_simplified_graphs_compute_the_same(tmp_path: Path) -> None:
    pytest.importorskip("onnxslim", reason="extra `simplify` is not installed")
    model = nets.transformer()
    common: dict[str, Any] = {"data": nets.tokens(), "unit_ratio": 0.5}
    plain = onnxgrail.compress(model, tmp_path / "p.onnx", **common)
    slim = onnxgrail.compress(model, tmp_path / "s.onnx", simplify=True, **common)
    entry = slim.report.data["simplify"]
    assert plain.report.data["simplify"] is None
    assert entry["nodes_after"] == len(onnx.load(tmp_path / "s.onnx").graph.node) <= entry["nodes_before"]
    assert entry["nodes_before"] == len(onnx.load(tmp_path / "p.onnx").graph.node)
    with open_session(tmp_path / "p.onnx") as one, open_session(tmp_path / "s.onnx") as two:
        for name, array in one.run(nets.tokens()).items():
            np.testing.assert_allclose(two.run(nets.tokens())[name], array, rtol=1e-4, atol=1e-5)
    assert slim.report.data["blocks"] == plain.report.data["blocks"]  # names are those of the given file


# -------------------------------------------------------------------------------------------------------------- target


def test_a_target_says_what_it_refuses(resnet: Any, tmp_path: Path) -> None:
    words = ("compress", resnet.model, tmp_path / "o.onnx", "--data", resnet.calibration, "--unit-ratio", 0.3)
    words += ("--target", "tensorrt", "--samples", 16, "--compensate", "none")
    result = run(*words, "--strict")
    assert result.exit_code == 0, result.output
    assert "no problem found" in result.stdout
    again = run(*words, "--force", "--quantize", "int8-dynamic")
    assert again.exit_code == 0
    assert "problem: DynamicQuantizeLinear" in again.stdout
    strict = run(*words, "--force", "--quantize", "int8-dynamic", "--strict", "--json")
    assert strict.exit_code == 3
    assert "would refuse the model: 2 problems" in strict.stderr
    target = json.loads(strict.stdout)["target"]
    assert (target["name"], target["strict"], target["passed"]) == ("tensorrt", True, False)
    assert (tmp_path / "o.onnx").exists()


def test_small_channels_beside_large_ones_keep_their_values(tmp_path: Path) -> None:
    """A detector's last layer computes boxes in pixels and scores: one range of 8 bits would drown the scores."""
    rng = np.random.default_rng(0)
    sizes = np.array([300.0, 300.0, 300.0, 300.0, 0.5])
    weights = {
        "w": rng.normal(size=(16, 3, 3, 3)).astype(np.float32) / 5,
        "v": (rng.normal(size=(5, 16, 1, 1)) * sizes[:, None, None, None]).astype(np.float32),
    }
    body = """
        a = Conv<pads = [1, 1, 1, 1]>(x, w)
        b = Relu(a)
        y = Conv(b, v)
    """
    model = ir.to_proto(tiny("float[N,3,6,6] x => float[N,5,6,6] y", body, weights))
    onnx.save(model, tmp_path / "d.onnx")
    feed = nets.images(64)
    words: dict[str, Any] = {"data": feed, "held_out": 0, "ratio": 0, "check": False}
    result = onnxgrail.compress(tmp_path / "d.onnx", tmp_path / "q.onnx", quantize="int8", qdq=True, **words)
    entry = result.report.data["quantization"]
    assert entry["kept_float"] == ["Conv_2"]
    assert "boxes and scores" in entry["kept_float_reason"]
    runs = []
    for name in ("d.onnx", "q.onnx"):
        with open_session(tmp_path / name) as session:
            runs.append(next(iter(session.run(feed).values()))[:, 4])
    assert np.square(runs[1] - runs[0]).sum() < 0.01 * np.square(runs[0]).sum()


def test_a_quantised_model_that_is_slower_is_told() -> None:
    def times(median: float, interval: tuple[float, float]) -> Times:
        return Times(median=median, mean=median, p90=median, p99=median, spread=0.0, ratio=1.0, interval=interval)

    quick, slow, unsure = times(1.0, (1.2, 1.3)), times(2.0, (0.6, 0.7)), times(2.0, (0.6, 1.25))
    (note,) = ship._slow(quick, slow)
    assert "takes 2.00 times as long as before" in note
    assert ship._slow(quick, unsure) == []
    assert ship._slow(slow, quick) == []


@pytest.mark.parametrize(
    ("choices", "size"),
    [
        ({"quantize": "int8"}, 0.2),
        ({"quantize": "int8-dynamic"}, 0.4),  # convolutions stay in float
        ({"quantize": "int8", "qdq": True}, 0.2),
    ],
)
def test_a_size_is_that_of_the_quantized_file(
    choices: dict[str, Any], size: float, resnet: Any, tmp_path: Path
) -> None:
    given = {"data": resnet.calibration, "samples": 32, "compensate": "none", "check": False, **choices}
    report = onnxgrail.compress(resnet.model, tmp_path / "o.onnx", target_size=f"{size:%}", **given).report.data
    limit = size * resnet.model.stat().st_size
    assert 0.95 * limit < (tmp_path / "o.onnx").stat().st_size == report["model"]["budget"]["achieved"] <= limit


def test_a_size_that_quantization_meets_alone_needs_no_narrower_blocks(tmp_path: Path) -> None:
    onnx.save(nets.mlp((24, 192, 128, 10)), tmp_path / "m.onnx")
    given: dict[str, Any] = {"quantize": "fp16", "check": False, "target_size": "60%"}
    report = onnxgrail.compress(tmp_path / "m.onnx", tmp_path / "o.onnx", **given).report.data
    assert all(block["kept"] == block["units"] for block in report["blocks"])
    assert (tmp_path / "o.onnx").stat().st_size <= report["model"]["budget"]["limit"]


def test_layers_that_would_stay_in_float_get_8_bits_if_a_size_needs_it(
    resnet: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = by_tool.in_form

    def tried(prepared: Prepared, slim: ir.Model, recipe: Recipe, half: Any = None, trials: Any = None) -> Quantised:
        found = made(prepared, slim, recipe, half, None)
        return found if trials is None else replace(found, model=slim)

    monkeypatch.setattr(by_tool, "in_form", tried)
    given = {"data": resnet.calibration, "samples": 32, "quantize": "int8", "check": False}
    report = onnxgrail.compress(resnet.model, tmp_path / "o.onnx", target_size="20%", **given).report.data
    assert (tmp_path / "o.onnx").stat().st_size <= report["model"]["budget"]["limit"]
    assert by_tool.FULL in report["notes"]
