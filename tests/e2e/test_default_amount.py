"""Without an amount, `compress` removes what a loss of 1 % allows; that needs data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnxgrail
from onnxgrail.options import LAYERS_RATIO, MAX_LOSS
from onnxgrail.recipe.check import recipe_of
from onnxgrail.recipe.table import AMOUNTS
from onnxgrail.report.page.command import command_of
from tests.command import run

from .test_max_loss import inputs, planted

QUICK: dict[str, Any] = {"minimize": "params", "selector": "obs"}
WITHOUT = "Error: --max-loss 1% (the default) needs --data: without data no loss can be measured. Give --data ("


def options(choices: dict[str, Any]) -> list[str]:
    return [word for name, value in choices.items() for word in (f"--{name}", value)]


@pytest.fixture
def redundant(folder: Path) -> Path:
    """The folder with a model that has each neuron three times, and 96 samples."""
    planted(folder / "m.onnx")
    np.savez(folder / "d.npz", **inputs(96))
    return folder


def test_data_alone_mean_a_loss_of_one_percent(redundant: Path) -> None:
    folder = redundant
    words = ("--data", folder / "d.npz", "--report", folder / "r.json", *options(QUICK))
    done = run("compress", folder / "m.onnx", folder / "o.onnx", *words)
    assert done.exit_code == 0, done.output
    report = onnxgrail.Report.from_json((folder / "r.json").read_text())
    recipe, search = report.data["recipe"], report.data["allocation"]["search"]
    assert {name: recipe[name] for name in AMOUNTS if recipe[name] is not None} == {"max_loss": MAX_LOSS}
    loss = search["tried"][search["chosen"]]["loss"]
    assert 0 < loss["bound"] <= MAX_LOSS
    assert f"with 95 % confidence at most {loss['bound']:.2%}" in done.stdout
    assert "--max-loss 1%\n" in done.stdout
    assert "Ratio: " not in done.stdout
    assert "--max-loss 1%" in command_of(report.data)
    assert "narrowed: asked for a loss of at most 1" in report.to_html()
    asked = onnxgrail.compress(folder / "m.onnx", folder / "p.onnx", data=folder / "d.npz", max_loss="1%", **QUICK)
    assert (folder / "p.onnx").read_bytes() == (folder / "o.onnx").read_bytes()
    assert f"Loss: {loss['mean']:.2%}" in repr(asked.report)
    told = f"Modeled latency: {search['before']:.3g} ms -> {search['cost']:.3g} ms ("
    assert (told in done.stdout) is (search["minimize"] == "latency")


@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--max-loss", "0.01"), ("--held-out", "d.npz")])
def test_without_data_it_is_a_usage_error(more: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    done = run("compress", "m.onnx", *more)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(WITHOUT)
    assert done.stderr.endswith("or --ratio 0.2 for a size without a promise of quality\n")
    assert sorted(folder.rglob("*")) == before


def test_wrong_paths_are_told_first(folder: Path) -> None:
    assert run("compress", folder / "absent.onnx").exit_code == 1
    (folder / "o.onnx").write_text("mine")
    assert "exists. Use --force" in run("compress", folder / "m.onnx", folder / "o.onnx").stderr


def test_another_amount_takes_its_place(folder: Path) -> None:
    done = run("compress", folder / "m.onnx", "--ratio", "0.3", "--report", folder / "r.json")
    assert done.exit_code == 0, done.output
    recipe = json.loads((folder / "r.json").read_text())["recipe"]
    assert (recipe["max_loss"], recipe["ratio"]) == (None, 0.3)
    for name, value in (("ratio", 0.2), ("unit_ratio", 0.2), ("target_params", "60%"), ("max_loss", 0.02)):
        made = recipe_of({name: value})
        assert {n: getattr(made, n) for n in AMOUNTS if getattr(made, n) is not None} == {name: value}


def test_low_rank_layers_alone_have_a_ratio_by_default() -> None:
    recipe = recipe_of({"method": "grasp"})
    assert (recipe.max_loss, recipe.ratio) == (None, LAYERS_RATIO)
    assert recipe_of({"method": "ic"}).max_loss == MAX_LOSS


@pytest.mark.parametrize(
    ("value", "told"),
    [("0", "max_loss must be above 0"), ("100%", "and below 1"), ("nan", "max_loss must be"), ("much", "max_loss is")],
)
def test_values_out_of_range(value: str, told: str, folder: Path) -> None:
    done = run("compress", folder / "m.onnx", "--data", folder / "d.npz", "--max-loss", value)
    assert (done.exit_code, told in done.stderr) == (2, True), done.output


def test_help_says_so() -> None:
    text = " ".join(run("compress", "--help").stdout.split())
    assert "[default: 1%, unless another amount is given]" in text
    assert "[default: 0.3]" not in text


def test_a_recipe_without_an_amount_needs_data(folder: Path) -> None:
    (folder / "hand.yaml").write_text("selector: l2")
    assert run("apply", folder / "hand.yaml", folder / "m.onnx", "--dry-run").stderr.startswith(WITHOUT)


def test_a_model_without_blocks_says_why(folder: Path) -> None:
    done = run("compress", folder / "m.onnx", "--data", folder / "d.npz", "--blocks", "conv")
    assert (done.exit_code, "none of the 3 blocks is of the kinds and names asked for" in done.stderr) == (4, True)


def test_an_allocation_without_an_amount_is_refused(folder: Path) -> None:
    done = run("compress", folder / "m.onnx", "--data", folder / "d.npz", "--allocate", "depth")
    assert (done.exit_code, "--allocate depth distributes a given amount" in done.stderr) == (2, True)


def test_what_the_search_does_not_judge_is_noted(redundant: Path) -> None:
    folder = redundant
    methods = ("--method", "grail,grasp", "--grasp-rank", "magnitude", "--grasp-layers", "down")
    words = ("--data", folder / "d.npz", *methods, "--dry-run", *options(QUICK))
    done = run("compress", folder / "m.onnx", *words)
    assert "the loss was measured before --method grasp; Fidelity tells that of the result" in done.stderr
