"""The default selector as the report names it block by block, and written models that give the same bytes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.algebra.select.selectors.auto import Auto
from onnxgrail.recipe import effort
from onnxgrail.recipe.check import recipe_of

from . import nets


def made(target: Path, rows: int, **choices: Any) -> tuple[dict[str, Any], bytes]:
    data = {name: array[:rows] for name, array in nets.vectors(400).items()}
    choices = {"unit_ratio": 0.5, "round_to": 1, "held_out": 0, "force": True, **choices}
    report = onnxgrail.compress(nets.mlp(), target, data=data, **choices).report.data
    return report, target.read_bytes()


def units(report: dict[str, Any]) -> list[list[int]]:
    return [block["kept_units"] for block in report["blocks"]]


def selectors(report: dict[str, Any]) -> set[str]:
    return {block["selector"] for block in report["blocks"]}


@pytest.mark.parametrize("compensate", ["best", "grail"])
def test_the_default_takes_the_elimination_for_narrow_blocks(tmp_path: Path, compensate: str) -> None:
    report, _ = made(tmp_path / "a.onnx", 400, compensate=compensate)
    same, other = (made(tmp_path / "b.onnx", 400, compensate=compensate, selector=s)[0] for s in ("obs", "wanda"))
    assert (report["recipe"]["selector"], selectors(report)) == ("auto", {"obs"})
    assert units(report) == units(same)
    assert units(report) != units(other)
    assert selectors(other) == {"wanda"}


def test_few_rows_and_no_compensation_leave_the_choice_to_the_diagonal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows do only in large blocks."""
    assert selectors(made(tmp_path / "a.onnx", 8)[0]) == {"obs"}
    monkeypatch.setitem(SELECTORS, "auto", Auto(small=0))
    report, _ = made(tmp_path / "a.onnx", 8)
    assert selectors(report) == {"wanda"}
    assert units(report) == units(made(tmp_path / "b.onnx", 8, selector="wanda")[0])
    plain, _ = made(tmp_path / "a.onnx", 400, compensate="none")
    assert (plain["recipe"]["selector"], selectors(plain)) == ("wanda", {"wanda"})


def test_folds_name_no_selector(tmp_path: Path) -> None:
    assert selectors(made(tmp_path / "a.onnx", 400, reducer="fold")[0]) == {""}


@pytest.mark.parametrize("choices", [{"effort": "max"}, {"effort": "max", "selector": "auto"}, {"effort": "fast"}])
def test_the_written_model_gives_the_same_bytes_again(tmp_path: Path, choices: dict[str, str]) -> None:
    _, wanted = made(tmp_path / "a.onnx", 400, **choices)
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **nets.vectors(400))
    onnxgrail.apply(tmp_path / "a.onnx", tmp_path / "m.onnx", tmp_path / "c.onnx", data=tmp_path / "d.npz", held_out=0)
    assert (tmp_path / "c.onnx").read_bytes() == wanted


def test_a_model_made_without_torch_gives_the_same_bytes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effort, "find_spec", lambda name: None)
    _, wanted = made(tmp_path / "a.onnx", 400, effort="max")
    monkeypatch.setattr(effort, "find_spec", lambda name: object())
    assert recipe_of({"effort": "max"}).refine
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **nets.vectors(400))
    onnxgrail.apply(tmp_path / "a.onnx", tmp_path / "m.onnx", tmp_path / "c.onnx", data=tmp_path / "d.npz", held_out=0)
    assert (tmp_path / "c.onnx").read_bytes() == wanted
