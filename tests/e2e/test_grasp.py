"""`--method grasp` as a whole, ranked by size, so that it needs no torch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner

import onnxgrail
from onnxgrail import models
from onnxgrail.calibration.observe import observe
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.cli import main
from onnxgrail.graph.cuts.residual import layers
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.trace.facts import constants
from onnxgrail.methods.grasp.distances import Apart
from tests.shorter import shorter
from tests.tiny import mlp, numbers, tiny

LLAMA, VIT = models.load("char_llama"), models.load("digits_vit")
ROW = {
    "layer", "weight", "nodes", "inputs", "outputs", "rank", "params_before", "params_after", "redundancy", "error",
}  # fmt: skip


def data(rows: int = 96, seed: int = 1) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(rows, 5)).astype(np.float32)}


def grasped(model: Any, given: Any = None, **choices: Any) -> onnxgrail.report.result.Result:
    common: dict[str, Any] = {"method": "grasp", "grasp_rank": "magnitude", "check": False, "held_out": 0}
    source = ir.to_proto(model) if isinstance(model, ir.Model) else model
    return onnxgrail.compress(source, data=data() if given is None else given, **{**common, **choices})


def error(dense: ir.Model, slim: ir.Model, given: dict[str, Any]) -> float:
    """Squared error of the outputs, as a share."""
    with open_session(to_bytes(dense)) as a, open_session(to_bytes(slim)) as b:
        wanted, got = (s.run(given)["y"].astype(np.float64) for s in (a, b))
    return float(np.square(got - wanted).sum() / np.square(wanted).sum())


def test_the_report_says_what_was_replaced(tmp_path: Path) -> None:
    target = tmp_path / "slim.onnx"
    common = {"method": "grasp", "grasp_layers": 2, "grasp_rank": "magnitude", "samples": 16}
    report = onnxgrail.compress(LLAMA.model, target, data=LLAMA.calibration, **common).report.data
    entry, model = report["methods"]["grasp"], report["model"]
    assert (entry["retain"], entry["rank_by"], entry["whiten"], entry["loss"]) == (0.1, "magnitude", False, None)
    by_redundancy = sorted(entry["layers"], key=lambda e: -e["redundancy"])
    assert [e["replaced"] for e in by_redundancy] == [True, True, False, False]
    assert [e["name"] for e in entry["layers"]] == [f"llama.model.layers.{k}" for k in range(4)]
    chosen = {e["name"]: e["redundancy"] for e in by_redundancy[:2]}
    file = {t.name: tuple(t.dims) for t in onnx.load(target).graph.initializer}
    assert len(entry["matrices"]) == 14
    for row in entry["matrices"]:
        assert set(row) == ROW
        m, n, k = row["inputs"], row["outputs"], row["rank"]
        assert k == int(0.1 * m * n / (m + n))
        assert (row["params_before"], row["params_after"]) == (m * n, k * (m + n))
        assert row["redundancy"] == chosen[row["layer"]]
        assert 0 < row["error"]["lost"] < 1
        assert row["weight"] not in file
        assert (file[f"{row['weight']}/down"], file[f"{row['weight']}/up"]) == ((m, k), (k, n))
    gone = sum(row["params_before"] - row["params_after"] for row in entry["matrices"])
    assert model["params_before"] - model["params_after"] == gone
    assert model["model_ratio"] == pytest.approx(gone / model["params_before"])
    assert (model["ratio_of"], model["asked_ratio"], model["ratio_total"]) == ("layers", None, entry["params"])
    assert model["achieved_ratio"] == pytest.approx(gone / entry["params"])
    again = onnxgrail.inspect(target)
    assert (again.params, again.bytes) == (model["params_after"], model["bytes_after"])
    # The same number of tokens passes every one of these matrices.
    assert model["macs_before"] - model["macs_after"] == 128 * gone
    assert report["blocks"]
    assert all(b["outcome"]["status"] == "skipped" for b in report["blocks"])
    assert report["verification"]["checker"]


def test_what_was_predicted_is_what_the_written_file_has(tmp_path: Path) -> None:
    common = {"method": "grasp", "grasp_layers": 1, "grasp_rank": "magnitude", "samples": 8, "check": False}
    target = tmp_path / "slim.onnx"
    dry = onnxgrail.compress(LLAMA.model, target, data=LLAMA.calibration, dry_run=True, **common).report.data["model"]
    assert not target.exists()
    real = onnxgrail.compress(LLAMA.model, target, data=LLAMA.calibration, **common).report.data["model"]
    assert {k: dry[k] for k in ("params_after", "macs_after")} == {k: real[k] for k in ("params_after", "macs_after")}
    assert dry["bytes_after"] == pytest.approx(real["bytes_after"], rel=0.01)
    common = {"ratio": 0.0, "dry_run": True, "samples": 8, "check": False}
    again = onnxgrail.compress(target, data=LLAMA.calibration, **common).report.data["model"]
    assert again["macs_before"] == real["macs_after"]


def test_a_ratio_takes_the_most_redundant_layers_until_it_is_met() -> None:
    model = mlp(4, 16)
    common = {"grasp_retain": 0.4}
    whole = grasped(model, grasp_layers=1, **common).report.data["model"]["achieved_ratio"]
    for count in (1, 2, 3):
        found = grasped(model, ratio=(count - 0.5) * whole, **common).report.data
        assert sum(e["replaced"] for e in found["methods"]["grasp"]["layers"]) == count
        assert found["model"]["achieved_ratio"] >= (count - 0.5) * whole
    found = grasped(model, ratio=0.99, **common).report.data
    assert all(e["replaced"] for e in found["methods"]["grasp"]["layers"])
    assert any("all 4 layers together" in note for note in found["notes"])
    assert not grasped(model, ratio=0.0).report.data["methods"]["grasp"]["matrices"]


def test_layers_and_matrices_are_chosen_by_name() -> None:
    model = mlp(3, 16)
    names = [e["name"] for e in grasped(model, grasp_layers=3).report.data["methods"]["grasp"]["layers"]]

    def weights(**choices: Any) -> set[str]:
        return {row["weight"] for row in grasped(model, **choices).report.data["methods"]["grasp"]["matrices"]}

    assert weights(grasp_layers=(names[1],)) == {"a1", "c1"}
    assert weights(grasp_layers=f"{names[2]},a0") == {"a0", "a2", "c2"}
    assert weights(grasp_layers="all", include="^a") == {"a0", "a1", "a2"}
    assert weights(grasp_layers="all", exclude="^c") == {"a0", "a1", "a2"}
    assert weights(grasp_layers="all") == {f"{w}{k}" for w in "ac" for k in range(3)}
    assert weights(grasp_layers="all", include="head|stem") == {"head", "stem"}  # in no layer, but named
    assert weights(grasp_layers="head", grasp_retain=0.5) == {"head"}


def test_matrices_of_no_layer_are_named_where_all_layers_are_meant() -> None:
    told = "2 matrices are in no layer: --grasp-layers all --include '.*' has them, too"
    assert told in grasped(mlp(3, 16), grasp_layers="all").report.data["notes"]
    plain = tiny(
        "float[N,5] x => float[N,4] y", "h = MatMul(x, v)\nr = Relu(h)\ny = MatMul(r, w)", {"v": (5, 16), "w": (16, 4)}
    )
    with pytest.raises(onnxgrail.NothingToCompressError, match="no residual layer") as caught:
        grasped(plain, grasp_layers="all")
    assert caught.value.hint == told
    assert grasped(plain, grasp_layers="all", include=".*").report.data["methods"]["grasp"]["matrices"]


def test_directions_that_matter_to_the_data_and_a_fit_behind_them_come_closer() -> None:
    model, fresh = mlp(3, 24, features=12), data(seed=5)
    errors = {
        (whiten, refit): error(model, grasped(model, grasp_layers="all", grasp_retain=0.5, **choices).model, fresh)
        for whiten in (False, True)
        for refit in (False, True)
        for choices in [{"grasp_whiten": whiten, "grasp_refit": refit}]
    }
    assert errors[True, False] < 0.9 * errors[False, False]
    assert errors[False, True] < 0.9 * errors[False, False]
    assert errors[True, True] <= errors[True, False]


def test_errors_of_a_fit_are_reported() -> None:
    rows = grasped(mlp(3, 24, features=12), grasp_layers="all", grasp_refit=True).report.data["methods"]["grasp"]
    assert rows["refit"]["after"] < rows["refit"]["before"]
    assert rows["refit"]["taken"]
    errors = [row["error"] for row in rows["matrices"]]
    assert all(0 <= e["after"] <= e["before"] for e in errors)
    assert any(e["after"] < 0.9 * e["before"] for e in errors)


@pytest.mark.parametrize("refit", [False, True])
def test_layers_have_rows_of_parameters_and_errors(refit: bool) -> None:
    """The last layer's error is measured here again, at the tensor that leaves it."""
    model = mlp(3, 24, features=12)
    found = grasped(model, grasp_layers=2, grasp_refit=refit, grasp_retain=0.4)
    entry = found.report.data["methods"]["grasp"]
    matrices = entry["matrices"]
    for row in entry["layers"]:
        mine = [m for m in matrices if m["layer"] == row["name"]]
        assert bool(mine) == row["replaced"]
        before, after = (sum(m[f"params_{when}"] for m in mine) for when in ("before", "after"))
        assert row["params_before"] - row["params_after"] == before - after
        assert row["params_before"] >= before > 0 or not mine
    first = next(k for k, row in enumerate(entry["layers"]) if row["replaced"])
    for k, row in enumerate(entry["layers"]):
        assert (row["error"]["after"] > 0) == (k >= first)
        assert (row["error"]["after"] == row["error"]["before"]) == (k < first or not refit)
    plain = grasped(model, grasp_layers=2, grasp_refit=False, grasp_retain=0.4).report.data["methods"]["grasp"]
    assert [row["error"]["before"] for row in plain["layers"]] == [row["error"]["before"] for row in entry["layers"]]
    last = entry["layers"][-1]
    end = layers(model, observe(model, data(), providers=("CPUExecutionProvider",)).shapes, constants(model))[-1].end
    outputs = []
    for one in (model, found.model):
        with open_session(to_bytes(one, [end])) as session:
            outputs.append(session.run(data())[end].astype(np.float64))
    wanted, got = outputs
    assert last["error"]["after"] == pytest.approx(np.square(got - wanted).sum() / np.square(wanted).sum(), rel=1e-4)


def test_fits_that_bring_the_outputs_no_closer_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([1.0, 1.0, 2.0])

    def apart(*words: Any) -> Apart:
        return Apart(model=next(errors), layers={layer.name: 0.5 for layer in words[-1]})

    monkeypatch.setattr("onnxgrail.methods.grasp.steps.apart", apart)
    model = mlp(3, 24, features=12)
    plain, found = (grasped(model, grasp_layers="all", grasp_refit=refit) for refit in (False, True))
    assert found.report.data["methods"]["grasp"]["refit"] == {"before": 1.0, "after": 2.0, "taken": False}
    assert numbers(plain) == numbers(found)


def test_blocks_are_named_as_inspect_lists_them(tmp_path: Path) -> None:
    llama = shorter("char_llama", tmp_path)

    def layers_of(**choices: Any) -> set[tuple[str, int, int]]:
        common = {"samples": 8, "dry_run": True}
        rows = grasped(llama.model, llama.calibration, **common, **choices).report.data["methods"]["grasp"]["matrices"]
        return {(row["layer"].removeprefix("llama.model.layers."), row["inputs"], row["outputs"]) for row in rows}

    names = {b["name"] for b in onnxgrail.inspect(llama.model).blocks}
    assert {"llama.model.layers.1.mlp.mlp", "llama.model.layers.0.self_attn.heads"} <= names
    mlp_of_1 = {("1", 128, 384), ("1", 384, 128)}
    assert layers_of(grasp_layers="llama.model.layers.1.mlp.mlp") == mlp_of_1
    heads_of_0 = {("0", 128, 128), ("0", 128, 64)}
    assert layers_of(grasp_layers="llama.model.layers.1.mlp.mlp,llama.model.layers.0.self_attn.heads") == (
        mlp_of_1 | heads_of_0
    )
    assert layers_of(grasp_layers="all", include=r"1\.mlp") == mlp_of_1
    every = {(str(k), *sizes) for k in range(2) for _, *sizes in mlp_of_1}
    assert layers_of(grasp_layers="all", blocks="mlp") == every
    both = {"method": "grail,grasp", "unit_ratio": 0.5, "blocks": "mlp", "compensate": "none"}
    assert layers_of(grasp_layers="llama.model.layers.1", **both) == {
        ("1", 128, 192), ("1", 192, 128), ("1", 128, 128), ("1", 128, 64),
    }  # fmt: skip
    assert layers_of(grasp_layers="llama.model.layers.1.mlp.mlp", **both) == {("1", 128, 192), ("1", 192, 128)}
    assert layers_of(grasp_layers="llama.model.layers.1.mlp.down_proj") == {("1", 384, 128)}


def test_narrowed_first_and_then_replaced() -> None:
    model = mlp(3, 24, features=12)
    common = {"unit_ratio": 0.5, "round_to": 1, "blocks": ("mlp",), "grasp_layers": 1, "grasp_retain": 0.4}
    both = grasped(model, method="grail,grasp", **common)
    entry = both.report.data["methods"]["grasp"]
    assert {tuple(sorted((row["inputs"], row["outputs"]))) for row in entry["matrices"]} == {(12, 12)}
    assert {b["kept"] for b in both.report.data["blocks"] if b["kind"] == "mlp"} == {12}
    with open_session(to_bytes(both.model)) as session:
        assert session.run(data(3))["y"].shape == (3, 4)
    total = sum(v.const_value.size for v in both.model.graph.initializers.values())
    assert both.report.data["model"]["params_after"] == total


def test_a_weight_that_another_layer_shares_stays_unless_both_are_replaced() -> None:
    text = """
        s = MatMul(x, e)
        a = MatMul(s, w)
        b = MatMul(a, u)
        h = Add(s, b)
        c = MatMul(h, w)
        d = MatMul(c, v)
        g = Add(h, d)
        y = MatMul(g, f)
    """
    sizes = {"e": (5, 8), "w": (8, 8), "u": (8, 8), "v": (8, 8), "f": (8, 3)}
    model = tiny("float[N,5] x => float[N,3] y", text, sizes)
    one = grasped(model, grasp_layers=1).report.data
    assert len(one["methods"]["grasp"]["matrices"]) == 1
    (reason,) = {r["reason"] for r in one["refusals"] if r["value"] == "w"}
    assert "shared with" in reason
    both = grasped(model, grasp_layers=2)
    assert {row["weight"] for row in both.report.data["methods"]["grasp"]["matrices"]} == {"w", "u", "v"}
    assert both.report.data["model"]["params_after"] == sum(
        v.const_value.size for v in both.model.graph.initializers.values()
    )
    fitted = grasped(model, grasp_layers=2, grasp_refit=True, grasp_whiten=True)
    assert error(model, fitted.model, data(seed=7)) < error(model, both.model, data(seed=7))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"grasp_layers": 9}, "there are 3 layers"),
        ({"grasp_layers": 0}, "there are 3 layers"),
        ({"grasp_layers": "nonsense"}, "'nonsense' is not a layer, block, node or weight"),
        ({"grasp_retain": 1.0}, "grasp_retain"),
        ({"grasp_rank": "foo"}, "grasp_rank has no 'foo'"),
        ({"method": "foo"}, "method has no 'foo'"),
        ({"method": "grail", "grasp_layers": 1}, "needs --method grasp"),
        ({"method": "grail,grasp"}, "how many layers"),
        ({"target_params": "50%"}, "needs --method grail"),
        ({"include": "("}, "regular expression"),
    ],
)
def test_misuse_is_named(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(onnxgrail.UsageError, match=message.replace("(", r"\(")):
        grasped(mlp(3, 16), **choices)


def test_a_model_without_residual_layers_is_no_case_for_it() -> None:
    model = tiny("float[N,5] x => float[N,4] y", "a = MatMul(x, w)\ny = Relu(a)", {"w": (5, 4)})
    for choices in ({}, {"grasp_layers": 2}, {"grasp_layers": "all"}):
        with pytest.raises(onnxgrail.NothingToCompressError, match="no residual layer"):
            grasped(model, **choices)


def test_without_torch_gradients_are_refused_and_magnitudes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    for rank in ("attribution", "taylor"):
        with pytest.raises(onnxgrail.MissingExtraError, match=r"pip install 'onnxgrail\[torch\]'"):
            grasped(mlp(3, 16), grasp_rank=rank)
    assert grasped(mlp(3, 16), grasp_layers=1).report.data["methods"]["grasp"]["matrices"]


def test_the_command_prints_the_layers(tmp_path: Path) -> None:
    words = [
        "compress",
        str(VIT.model),
        str(tmp_path / "o.onnx"),
        "--ratio=0.3",
        "--data",
        str(VIT.calibration),
        "--samples",
        "32",
    ]
    words += ["--method", "grasp", "--grasp-layers", "1", "--grasp-rank", "magnitude", "--grasp-refit", "--no-check"]
    result = CliRunner().invoke(main, [*words, "--report", str(tmp_path / "r.json")])
    assert result.exit_code == 0, result.output
    entry = json.loads((tmp_path / "r.json").read_text())["methods"]["grasp"]
    (layer,) = [e for e in entry["layers"] if e["replaced"]]
    assert (
        f"GRASP: {len(entry['matrices'])} matrices of {layer['name']} (cosine {layer['redundancy']:.3f})"
        in result.output
    )
    assert "Ratio: asked" not in result.output
