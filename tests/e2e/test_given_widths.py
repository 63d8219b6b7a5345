"""Widths of a recipe: each block gets the number of units that the recipe names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import yaml

import onnxgrail
from onnxgrail.errors import NothingToCompressError, UsageError
from onnxgrail.report.page.command import command_of
from tests.command import run
from tests.tiny import tiny, two_mlps

DATA = {"x": np.random.default_rng(0).standard_normal((48, 6)).astype(np.float32)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of 16 and 12 neurons."""
    path = tmp_path_factory.mktemp("given") / "m.onnx"
    onnx.save(ir.to_proto(two_mlps(6, 16, 12)), path)
    return path


@pytest.fixture(scope="module")
def names(model: Path) -> list[str]:
    return [str(block["name"]) for block in onnxgrail.inspect(model).blocks]


def kept(result: Any) -> dict[str, int]:
    return {block["name"]: block["kept"] or block["units"] for block in result.report.data["blocks"]}


def test_every_block_gets_its_width_and_others_stay(model: Path, names: list[str], tmp_path: Path) -> None:
    both = onnxgrail.compress(model, tmp_path / "a.onnx", data=DATA, widths={names[0]: 5, names[1]: 11})
    assert kept(both) == {names[0]: 5, names[1]: 11}
    one = onnxgrail.compress(model, tmp_path / "b.onnx", data=DATA, widths={names[1]: 7})
    assert kept(one) == {names[0]: 16, names[1]: 7}


def test_given_widths_are_not_called_too_fine(model: Path, names: list[str], tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(yaml.safe_dump({"widths": {names[0]: 12}}))
    np.savez(tmp_path / "c.npz", **DATA)
    text = run("apply", tmp_path / "w.yaml", model, tmp_path / "o.onnx", "--data", tmp_path / "c.npz").stdout
    assert "Written: " in text
    assert "Finer steps" not in text
    convs = tiny(
        "float[N,3,6,6] x => float[N,4,6,6] y",
        "h = Conv(x, a)\nr = Relu(h)\ny = Conv(r, b)",
        {"a": (32, 3, 1, 1), "b": (4, 32, 1, 1)},
    )
    pixels = {"x": np.random.default_rng(0).standard_normal((48, 3, 6, 6)).astype(np.float32)}
    block = onnxgrail.inspect(ir.to_proto(convs)).blocks[0]["name"]
    result = onnxgrail.compress(ir.to_proto(convs), data=pixels, widths={block: 20}, latency=False)
    assert not any("another --ratio" in note or "--round-to" in note for note in result.report.data["notes"])


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".onnx", "report"])
def test_a_recipe_repeats_them(model: Path, names: list[str], tmp_path: Path, suffix: str) -> None:
    files = {"save_recipe": tmp_path / f"r{suffix}"} if suffix in (".yaml", ".json") else {}
    report = tmp_path / "report.json"
    onnxgrail.compress(model, tmp_path / "r.onnx", data=DATA, widths={names[0]: 5}, report=report, **files)
    source = report if suffix == "report" else tmp_path / f"r{suffix}"
    again = onnxgrail.apply(source, model, tmp_path / "again.onnx", data=DATA)
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "r.onnx").read_bytes()
    other = onnxgrail.apply(source, model, tmp_path / "other.onnx", data=DATA, ratio=0.5)
    assert kept(other) != kept(again)  # another amount replaces the widths


def test_the_command_of_the_page_applies_the_recipe(model: Path, names: list[str], tmp_path: Path) -> None:
    result = onnxgrail.compress(model, tmp_path / "r.onnx", data=DATA, widths={names[0]: 5})
    assert command_of(result.report.data).startswith(f"onnxgrail apply recipe.json {model}")
    assert "recipe.json is a file with the whole recipe" in result.report.to_html()


@pytest.mark.parametrize(
    ("widths", "text"),
    [
        ({"nobody": 3}, r"widths name the block 'nobody', which the model does not have"),
        ({"FIRST": 17}, r"widths give block .* 17 units, expected 1 to 16"),
        ({"FIRST": 0}, r"widths give block .* 0 units, expected 1 to 16"),
        ({"FIRST": 2.5}, r"widths is .*, expected names with whole numbers"),
        ({"FIRST": True}, r"widths is .*, expected names with whole numbers"),
        ({3: 3}, r"widths is .*, expected names with whole numbers"),
        ("FIRST", r"widths is .*, expected names with whole numbers"),
        ([3], r"widths is .*, expected names with whole numbers"),
    ],
)
def test_wrong_widths_are_usage_errors(model: Path, names: list[str], tmp_path: Path, widths: Any, text: str) -> None:
    if isinstance(widths, dict):
        widths = {names[0] if name == "FIRST" else name: width for name, width in widths.items()}
    with pytest.raises(UsageError, match=text):
        onnxgrail.compress(model, tmp_path / "o.onnx", data=DATA, widths=widths)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump({"widths": widths}))
    done = run("apply", recipe, model, tmp_path / "o.onnx")
    assert (done.exit_code, (tmp_path / "o.onnx").exists()) == (2, False), done.output


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"ratio": 0.2}, "--ratio and widths exclude each other"),
        ({"target_size": "50%"}, "--target-size and widths exclude each other"),
        ({"method": "grasp"}, "widths need --method grail"),
        ({"blocks": ("conv",)}, "which --blocks, --include or --exclude leave out"),
    ],
)
def test_contradictions_are_usage_errors(
    model: Path, names: list[str], tmp_path: Path, choices: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        onnxgrail.compress(model, tmp_path / "o.onnx", data=DATA, widths={names[0]: 5}, **choices)


def test_full_widths_leave_nothing_to_write(model: Path, names: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "r.json"
    recipe.write_text(json.dumps({"widths": {names[0]: 16}}))
    with pytest.raises(NothingToCompressError, match="the widths remove no unit from any of 2 blocks"):
        onnxgrail.apply(recipe, model, tmp_path / "o.onnx", data=DATA)
