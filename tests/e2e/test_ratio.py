"""`ratio` is a share of the parameters in blocks that can be narrowed, `unit_ratio` of the units of every block."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.core import Recipe, Refusal
from onnxgrail.narrowing import ready
from onnxgrail.recipe import storage
from onnxgrail.recipe.check import recipe_of
from onnxgrail.report.page.html import figures
from tests.command import run
from tests.tiny import tiny

from . import nets

DIGITS, VIT = models.load("digits_resnet"), models.load("digits_vit")
QUICK: dict[str, Any] = {"compensate": "none", "check": False, "dry_run": True}


def reported(model: Any, data: Any, **choices: Any) -> dict[str, Any]:
    found: dict[str, Any] = onnxgrail.compress(model, data=data, **{**QUICK, **choices}).report.data
    return found


@pytest.mark.parametrize("allocate", ["uniform", "depth", "flap", "global"])
@pytest.mark.parametrize("ratio", [0.2, 0.5])
def test_a_share_of_the_parameters_goes_however_it_is_spread(allocate: str, ratio: float) -> None:
    data = reported(nets.mlp((12, 64, 96, 80, 10)), nets.vectors(), ratio=ratio, allocate=allocate, samples=32)
    model = data["model"]
    inside = model["params_before"] - 10  # all but the last bias
    assert (model["ratio_of"], model["ratio_total"], model["asked_ratio"]) == ("blocks", inside, ratio)
    assert model["achieved_ratio"] == (model["params_before"] - model["params_after"]) / inside
    assert ratio - 0.01 <= model["achieved_ratio"] <= ratio + (0.03 if allocate == "global" else 0.015)
    assert model["model_ratio"] == 1 - model["params_after"] / model["params_before"]


@pytest.mark.parametrize("source", [DIGITS, VIT], ids=["resnet", "vit"])
def test_no_block_of_a_narrow_network_loses_much_more_than_its_share(source: Any) -> None:
    """Channels come in 16, 32 and 64, heads in 4: a multiple of 8 would halve the first."""
    data = reported(source.model, source.calibration, ratio=0.3, samples=16)
    assert data["model"]["achieved_ratio"] == pytest.approx(0.3, abs=0.01)
    for row in data["allocation"]["rounding"]:
        assert row["units"] - row["kept"] <= 1.25 * (row["units"] - row["asked"]) + 0.02
        assert row["multiple"] in (1, 2, 4, 8)
        assert row["kept"] < row["units"]


def test_a_weight_of_two_layers_counts_once() -> None:
    body = "a = MatMul(x, w1)\nb = Relu(a)\nc = MatMul(b, w2)\nd = MatMul(c, w1)\ne = Relu(d)\ny = MatMul(e, w2)"
    model = tiny("float[N,6] x => float[N,6] y", body, {"w1": (6, 32), "w2": (32, 6)})
    data = reported(ir.to_proto(model), {"x": np.random.default_rng(0).random((8, 6), np.float32)}, ratio=0.5)
    assert data["model"]["ratio_total"] <= data["model"]["params_before"] == 2 * 6 * 32
    assert data["model"]["achieved_ratio"] == pytest.approx(0.5, abs=0.02)


def test_blocks_that_fail_the_proof_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    proved = ready.proved

    def strict(prepared: Any, job: Any, blocks: Any, widths: Any, **options: Any) -> Any:
        good, _ = proved(prepared, job, blocks[1:], widths, **options)
        return good, (Refusal(value=blocks[0].name, node="", op="", reason="made up"),)

    monkeypatch.setattr(ready, "proved", strict)
    model = reported(nets.mlp(), nets.vectors(), ratio=0.3)["model"]
    assert model["ratio_total"] == model["params_before"] - 10 - 12 * 32 - 32  # without the first weight and bias
    assert model["achieved_ratio"] == pytest.approx(0.3, abs=0.02)


def test_inspect_predicts_what_a_ratio_gives() -> None:
    predicted = onnxgrail.inspect(DIGITS.model).predicted
    for guess in predicted:
        model = reported(DIGITS.model, DIGITS.calibration, ratio=guess["ratio"], samples=16)["model"]
        assert (guess["params"], guess["macs"]) == (model["params_after"], model["macs_after"])


@pytest.mark.parametrize("name", ["ratio", "unit_ratio"])
def test_a_share_of_zero_changes_no_bit(name: str, tmp_path: Path) -> None:
    result = onnxgrail.compress(DIGITS.model, tmp_path / "o.onnx", data=DIGITS.calibration, samples=16, **{name: 0})
    assert result.report.data["model"]["achieved_ratio"] == 0
    before, after = onnx.load(DIGITS.model), onnx.load(tmp_path / "o.onnx")
    assert [t.raw_data for t in before.graph.initializer] == [t.raw_data for t in after.graph.initializer]
    assert result.report.data["verification"]["outputs"][0]["max_abs"] == 0


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"ratio": 0.3, "unit_ratio": 0.3}, "--ratio and --unit-ratio exclude each other"),
        ({"unit_ratio": 0.3, "target_size": "60%"}, "--unit-ratio and --target-size exclude each other"),
        ({"unit_ratio": 1.5}, "unit_ratio must be at least 0 and below 1"),
        ({"unit_ratio": 0.3, "method": "grasp"}, "--unit-ratio needs --method grail"),
    ],
)
def test_one_of_them_says_how_much_goes(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(onnxgrail.UsageError, match=words):
        recipe_of(choices)
    if "method" not in choices and choices["unit_ratio"] < 1:
        options = [word for name, value in choices.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        told = run("compress", "m.onnx", *options)
        assert (told.exit_code, words in told.stderr) == (2, True)


@pytest.mark.parametrize("option", ["--ratio", "--unit-ratio"])
def test_asked_and_achieved_are_in_one_unit(option: str, folder: Path) -> None:
    words = ("compress", folder / "m.onnx", "--data", folder / "d.npz", option, "0.4", "--dry-run", "--no-check")
    text = run(*words, "--report", folder / "r.json").stdout
    model = json.loads((folder / "r.json").read_text())["model"]
    of = "parameters in blocks that can be narrowed" if option == "--ratio" else "channels, neurons and heads"
    label = option.removeprefix("--").replace("-", " ").capitalize()
    achieved = f"{model['achieved_ratio']:.1%}".replace("%", " %")
    assert f"{label}: asked 40.0 %, achieved {achieved} of the {model['ratio_total']:,} {of}\n" in text
    assert re.search(r"Whole model: [0-9.]+ % of the 2,618 parameters removed\n", text)
    page = onnxgrail.Report.from_json((folder / "r.json").read_text()).to_html()
    assert f"asked to remove {figures.share(0.4)} of {of}" in page


# ---------------------------------------------------------------------------------------------------------- recipes


def test_the_ratio_in_a_short_entry_of_a_model_is_one_of_parameters(folder: Path) -> None:
    model = ir.from_proto(nets.mlp())
    storage.mark(model, Recipe(ratio=0.4))
    storage.shorten(model)
    ir.save(model, folder / "short.onnx")
    found = storage.read(folder / "short.onnx")
    assert (found.choices["ratio"], found.choices.get("unit_ratio")) == (0.4, None)


def test_an_amount_of_the_call_replaces_that_of_the_recipe(folder: Path) -> None:
    (folder / "r.yaml").write_text("unit_ratio: 0.4\nblocks: mlp")
    for choices in ({"ratio": 0.2}, {"target_params": "70%"}, {"unit_ratio": 0.1}):
        result = onnxgrail.apply(folder / "r.yaml", folder / "m.onnx", data=nets.vectors(), dry_run=True, **choices)
        recipe = result.report.data["recipe"]
        assert {n: recipe[n] for n in ("ratio", "unit_ratio", "target_params") if recipe[n] is not None} == choices
