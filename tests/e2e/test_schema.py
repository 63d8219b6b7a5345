"""The report of schema 1: every field, a mask oracle that needs nothing but it and the two models, and the cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.stream import ways
from onnxgrail.cli import main
from onnxgrail.graph.io.serial import Packed
from tests.command import sized
from tests.tiny import tiny

from . import nets

FIELDS = {
    "": (
        "schema tool recipe environment model allocation blocks refits norms refines methods refusals verification "
        "interface expected timing peak_rss_bytes simplify quantization target latency"
    ),
    "tool": "name version",
    "environment": "onnx onnxruntime numpy providers threads",
    "model": (
        "input output sha256_before sha256_after params_before params_after macs_before macs_after "
        "bytes_before bytes_after asked_ratio achieved_ratio ratio_of ratio_total model_ratio "
        "sha256_data_before sha256_data_after budget"
    ),
    "allocation": "asked used note rounding curves",
    "verification": "checker ort_load outputs held_out judged headline",
    "block": "name kind units unit_size span kept selector exact members error outcome",
    "member": "initializer axis role kept cluster",
    "error": "plain compensated validation",
    "outcome": "status reason clamped",
    "refit": "node weight alpha blend before after clamped reason",
    "norm": "node kind before after outcome",
    "refusal": "value node op reason position",
    "output": "name cosine nmse max_abs cosine_min verdicts",
}


def report_of(model: onnx.ModelProto, feed: nets.Arrays, folder: Path, *words: str) -> tuple[dict[str, Any], Path]:
    """The report and the file that the command line makes."""
    onnx.save(model, folder / "m.onnx")
    np.savez(folder / "d.npz", **feed)
    path, output = folder / "r.json", folder / "o.onnx"
    common = ["compress", str(folder / "m.onnx"), str(output), "--data", str(folder / "d.npz"), "--report", str(path)]
    result = CliRunner().invoke(main, [*common, *sized(words)])
    assert result.exit_code == 0, result.output
    return json.loads(path.read_text()), output


def has(data: dict[str, Any], name: str) -> None:
    missing = set(FIELDS[name].split()) - set(data)
    assert not missing, f"{name or 'report'} lacks {missing}"


def test_every_field_of_schema_1(tmp_path: Path) -> None:
    data, _ = report_of(nets.convnet(), nets.images(), tmp_path)
    has(data, "")
    for name in ("tool", "environment", "model", "allocation", "verification"):
        has(data[name], name)
    assert (data["schema"], data["tool"]["name"]) == (1, "onnxgrail")
    assert data["tool"]["version"] == onnxgrail.__version__
    assert set(data["recipe"]) >= {"ratio", "blocks", "selector", "reducer", "compensate", "closed_loop", "seed"}
    assert data["blocks"]
    for block in data["blocks"]:
        has(block, "block")
        has(block["error"], "error")
        has(block["outcome"], "outcome")
        for member in block["members"]:
            has(member, "member")
        assert {m["role"] for m in block["members"]} >= {"producer", "consumer"}
        assert block["exact"] is True
    assert data["norms"] == data["refines"] == []  # nobody asked for them
    for refusal in data["refusals"]:
        has(refusal, "refusal")
    assert [has(o, "output") for o in data["verification"]["outputs"]] == [None]
    assert data["timing"]["forward"] > 0
    assert all(seconds >= 0 for seconds in data["timing"].values())
    assert data["peak_rss_bytes"] > 10**7
    assert data["verification"]["checker"] is data["verification"]["ort_load"] is True


def test_entries_of_refits(tmp_path: Path) -> None:
    data, _ = report_of(nets.convnet(), nets.images(), tmp_path, "--allocate", "uniform")
    assert data["refits"]
    for entry in data["refits"]:
        has(entry, "refit")
        assert 0 <= entry["after"] <= entry["before"]
        assert 0 <= entry["blend"] <= 1
        assert entry["reason"] == ""
    weights = {entry["weight"] for entry in data["refits"]}
    assert {entry["node"] for entry in data["refits"]} <= {name for block in data["blocks"] for name in block["nodes"]}
    for block in data["blocks"]:
        fitted = weights & {m["initializer"] for m in block["members"] if m["role"] == "consumer"}
        assert (block["error"]["validation"] is not None) == bool(fitted)


def test_entries_of_norms(tmp_path: Path) -> None:
    """One per activation that differs and that constants scale: error shares on held-out rows, and what was decided."""
    data, output = report_of(nets.convnet(), nets.images(), tmp_path, "--norms", "all", "--compensate", "none")
    nodes = {name for n in onnx.load(output).graph.node for name in n.output}
    convolutions = sum(n.op_type == "Conv" for n in onnx.load(output).graph.node)
    assert 0 < len(data["norms"]) <= convolutions
    for entry in data["norms"]:
        has(entry, "norm")
        has(entry["outcome"], "outcome")
        assert entry["kind"] == "repair"  # the net has no normalisations to refit
        assert entry["node"] in nodes
        assert 0 <= entry["after"] <= entry["before"]
        assert (entry["outcome"]["status"] == "plain") == bool(entry["outcome"]["reason"])
    assert {e["outcome"]["status"] for e in data["norms"]} <= {"ok", "plain"}
    assert data["recipe"]["norms"] == "all"
    assert data["calibration"]["samples"] == 32  # 8 of 40 are held back
    assert data["timing"]["norms"] > 0


def test_sizes_and_ratios_are_those_of_the_files(tmp_path: Path) -> None:
    data, output = report_of(nets.mlp(), nets.vectors(), tmp_path, "--unit-ratio", "0.5")
    model = data["model"]
    source = tmp_path / "m.onnx"
    for path, when in ((source, "before"), (output, "after")):
        weights = nets.weights_of(onnx.load(path))
        assert model[f"params_{when}"] == sum(a.size for a in weights.values())
        assert model[f"macs_{when}"] == sum(a.size for a in weights.values() if a.ndim == 2)
        assert model[f"bytes_{when}"] == path.stat().st_size
    assert (model["input"], model["output"], model["asked_ratio"]) == (str(source), str(output), 0.5)
    assert model["model_ratio"] == pytest.approx(1 - model["params_after"] / model["params_before"])
    assert (model["ratio_of"], model["ratio_total"]) == ("units", sum(b["units"] for b in data["blocks"]))
    gone = sum(b["units"] - b["kept"] for b in data["blocks"])
    assert model["achieved_ratio"] == pytest.approx(gone / model["ratio_total"])


def test_refusals_name_node_and_reason(tmp_path: Path) -> None:
    data, _ = report_of(nets.transformer(), nets.tokens(), tmp_path)
    assert data["refusals"]
    assert all(r["value"] and r["reason"] for r in data["refusals"])


# ----------------------------------------------------------------------------------------------------- the mask oracle


def masked(model: onnx.ModelProto, blocks: list[dict[str, Any]]) -> onnx.ModelProto:
    """The original in which what every consumer member does not keep is zero."""
    weights = {t.name: t for t in model.graph.initializer}
    for block in blocks:
        for member in block["members"]:
            if member["role"] == "consumer" and block["kept"] < block["units"]:
                tensor = weights[member["initializer"]]
                array = numpy_helper.to_array(tensor).copy()
                dropped = np.setdiff1d(np.arange(array.shape[member["axis"]]), member["kept"])
                np.moveaxis(array, member["axis"], 0)[dropped] = 0
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return model


def run(model: onnx.ModelProto, feed: nets.Arrays) -> list[Any]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feed))


def llama() -> tuple[onnx.ModelProto, nets.Arrays]:
    found = models.load("char_llama")
    with np.load(found.calibration) as file:
        return onnx.load(found.model), {n: file[n][:16, :48] for n in file.files}


def digits() -> tuple[onnx.ModelProto, nets.Arrays]:
    found = models.load("digits_resnet")
    with np.load(found.calibration) as file:
        return onnx.load(found.model), {n: file[n][:64] for n in file.files}


@pytest.mark.parametrize("round_to", ["1", "8"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: (nets.mlp(), nets.vectors()),
        lambda: (nets.convnet(), nets.images()),
        lambda: (nets.transformer(), nets.tokens(padded=True)),
        digits,
        llama,
    ],
    ids=["mlp", "convnet", "transformer", "digits", "llama"],
)
def test_exact_means_the_masked_original(
    make: Callable[[], tuple[onnx.ModelProto, nets.Arrays]], round_to: str, tmp_path: Path
) -> None:
    model, feed = make()
    words = ("--compensate", "none", "--reducer", "prune", "--unit-ratio", "0.4", "--round-to", round_to, "--no-check")
    data, output = report_of(model, feed, tmp_path, *words)
    assert any(b["kept"] < b["units"] for b in data["blocks"])
    slim, expected = run(onnx.load(output), feed), run(masked(onnx.load(tmp_path / "m.onnx"), data["blocks"]), feed)
    original = run(model, feed)
    for got, wanted, dense in zip(slim, expected, original, strict=True):
        scale = np.abs(wanted).max()
        assert np.abs(got - wanted).max() < 1e-5 * scale
        assert np.abs(dense - wanted).max() > 1e-2 * scale


def test_kept_lists_give_the_shapes_of_the_output(tmp_path: Path) -> None:
    data, output = report_of(
        nets.transformer(), nets.tokens(), tmp_path, "--unit-ratio", "0.5", "--compensate", "grail"
    )
    before, after = nets.weights_of(onnx.load(tmp_path / "m.onnx")), nets.weights_of(onnx.load(output))
    for block in data["blocks"]:
        for member in block["members"]:
            name, axis, kept = member["initializer"], member["axis"], member["kept"]
            assert len(kept) == after[name].shape[axis]
            if member["role"] != "consumer":
                np.testing.assert_array_equal(after[name], np.take(before[name], kept, axis=axis))
    assert [b["kind"] for b in data["blocks"]] == ["heads", "mlp", "heads", "mlp"]  # attention before its layer's MLP
    assert [b["unit_size"] for b in data["blocks"]] == [nets.HEAD, 1, nets.HEAD, 1]


def test_clusters_of_a_fold(tmp_path: Path) -> None:
    data, output = report_of(nets.mlp(), nets.vectors(), tmp_path, "--reducer", "fold", "--compensate", "none")
    before, after = nets.weights_of(onnx.load(tmp_path / "m.onnx")), nets.weights_of(onnx.load(output))
    first = data["blocks"][0]
    for member in first["members"]:
        assert len(member["cluster"]) == first["units"]
        assert sorted(set(member["cluster"])) == list(range(first["kept"]))
    cluster = np.array(first["members"][0]["cluster"])
    means = [before["w0"][cluster == k].mean(axis=0) for k in range(first["kept"])]
    np.testing.assert_allclose(after["w0"], means, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("words", [(), ("--reducer", "fold"), ("--closed-loop",)])
def test_compensation_is_never_worse_on_its_own_data(words: tuple[str, ...], tmp_path: Path) -> None:
    data, _ = report_of(nets.transformer(), nets.tokens(count=4), tmp_path, "--unit-ratio", "0.5", *words)
    assert all((b["error"]["compensated"] is None) == (b["kind"] == "qk") for b in data["blocks"])  # not fitted
    fitted = [b["error"] for b in data["blocks"] if b["kind"] != "qk"]
    assert all(error["compensated"] <= error["plain"] for error in fitted)
    assert any(error["compensated"] < 0.9 * error["plain"] for error in fitted)


# ------------------------------------------------------------------------------------------------------------ the cost


def executed(monkeypatch: pytest.MonkeyPatch, depth: int, **choices: Any) -> tuple[int, int]:
    """Nodes that calibration runs on a chain of `depth` hidden layers, per feed, and nodes the model has."""
    return counted(monkeypatch, nets.mlp((16,) * (depth + 2)), nets.vectors(16, 16), depth, **choices)


def counted(
    monkeypatch: pytest.MonkeyPatch, model: onnx.ModelProto, data: Any, blocks: int, **choices: Any
) -> tuple[int, int]:
    """Nodes that calibration runs per feed of 8 samples out of 16, and nodes the model has."""
    count = 0
    real = ways.open_piece

    def counting(source: Packed, *options: Any) -> Any:
        size = len(onnx.ModelProto.FromString(source.data).graph.node)
        session = real(source, *options)
        inner = session.run

        def run_and_count(feed: Any) -> Any:
            nonlocal count
            count += size
            return inner(feed)

        session.run = run_and_count
        return session

    monkeypatch.setattr(ways, "open_piece", counting)
    choices = {"compensate": "grail", "unit_ratio": 0.5, "check": False, "batch_size": 8} | choices
    result = onnxgrail.compress(model, data=data, **choices)
    monkeypatch.undo()
    assert sum(b["kept"] < b["units"] for b in result.report.data["blocks"]) == blocks
    return math.ceil(count / 2), len(model.graph.node)


def test_closed_loop_costs_grow_with_the_depth_and_not_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = [executed(monkeypatch, depth, closed_loop=True) for depth in (4, 8, 16, 32)]
    for ran, nodes in costs:
        assert nodes * 0.6 < ran < 1.1 * nodes
    steps = [(costs[k + 1][0] - costs[k][0]) / (costs[k + 1][1] - costs[k][1]) for k in range(3)]
    assert max(steps) < 1.2 * min(steps)


def test_small_inputs_do_not_hold_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids weigh less than any activation, yet the cut has to leave them."""
    depth = 12
    lines = ["e0 = Gather(table, ids)"]
    for k in range(depth):
        lines += [f"h{k} = MatMul(e{k}, up{k})", f"r{k} = Relu(h{k})", f"d{k} = MatMul(r{k}, down{k})"]
        lines += [f"e{k + 1} = Add(e{k}, d{k})"]
    weights = {"table": (7, 16)} | {f"up{k}": (16, 32) for k in range(depth)}
    weights |= {f"down{k}": (32, 16) for k in range(depth)} | {"head": (16, 5)}
    lines += [f"n = LayerNormalization(e{depth}, scale)", "y = MatMul(n, head)"]
    model = ir.to_proto(tiny("int64[N,6] ids => float[N,6,5] y", "\n".join(lines), weights | {"scale": (16,)}))
    ids = np.random.default_rng(0).integers(0, 7, (16, 6))
    ran, nodes = counted(monkeypatch, model, {"ids": ids}, depth)
    assert ran < 1.1 * nodes


def test_open_loop_runs_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran, nodes = executed(monkeypatch, 8, closed_loop=False)
    assert nodes * 0.5 < ran <= nodes
