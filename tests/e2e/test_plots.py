"""Figures of a report: from a run, from a kept report, and what is said where matplotlib is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

import onnxgrail
from onnxgrail.errors import OutputError
from tests.command import run
from tests.page_data import encoder

from . import nets

ALL = {f"{name}.{kind}" for name in ("sizes", "errors", "curves", "sensitivity") for kind in ("png", "svg")}
PNG = b"\x89PNG\r\n\x1a\n"


def texts(path: Path) -> str:
    """The words of a figure: matplotlib leaves them in comments where it draws letters as shapes."""
    parser = ET.XMLParser(target=ET.TreeBuilder(insert_comments=True))
    tree = ET.parse(path, parser)
    return " ".join(str(e.text) for e in tree.iter() if e.tag is ET.Comment)


def test_a_run_draws_all_of_them(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    common = ("compress", folder / "m.onnx", folder / "o.onnx", "--data", folder / "d.npz")
    result = run(*common, "--plots", folder / "plots")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (folder / "plots").iterdir()} == ALL
    for path in (folder / "plots").glob("*.png"):
        assert path.read_bytes().startswith(PNG)
    assert "Latency, narrowed" in texts(folder / "plots" / "sizes.svg")
    assert "percent of the units kept" in texts(folder / "plots" / "curves.svg")


def test_a_kept_report_is_drawn_the_same_way_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    kept = onnxgrail.Report(data=encoder(curves=True)).to_json()
    places = [tmp_path / name for name in ("a", "b")]
    written = [onnxgrail.Report.from_json(kept).save_plots(place) for place in places]
    assert {path.name for path in written[0]} == ALL
    for first, second in zip(*written, strict=True):
        assert first.read_bytes() == second.read_bytes()
    words = texts(places[0] / "errors.svg")
    for block in encoder()["blocks"]:
        assert block["name"] in words
    assert "validation" in words


@pytest.mark.parametrize("changes", [{}, {"blocks": []}, {"blocks": encoder(150)["blocks"]}])
def test_what_was_not_measured_is_not_drawn(changes: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = onnxgrail.Report(data=encoder(**changes)).save_plots(tmp_path)
    names = ["sizes", "errors"] if changes != {"blocks": []} else ["sizes"]
    assert [path.stem for path in written[::2]] == names


def test_without_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said before the work, with the line that helps, and nothing is written."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else real(name))
    result = run("compress", folder / "m.onnx", folder / "o.onnx", "--data", folder / "d.npz", "--plots", folder / "p")
    assert result.exit_code == 1
    assert "pip install 'onnxgrail[plots]'" in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["d.npz", "m.onnx"]


def test_a_folder_that_cannot_be_made(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    for wrong in (folder / "m.onnx", folder / "m.onnx" / "plots"):
        with pytest.raises(OutputError):
            onnxgrail.compress(folder / "m.onnx", folder / "o.onnx", data=nets.vectors(), plots=wrong)
    assert not (folder / "o.onnx").exists()
