"""Pages that the command line writes."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import onnxgrail
from onnxgrail import models
from onnxgrail.report.page import inspection_page, report_page
from tests.command import run

from . import nets

DIGITS = models.load("digits_resnet")


def succeeds(*words: object) -> None:
    result = run(*words)
    assert result.exit_code == 0, result.output


def test_a_report_is_written_as_a_page_and_as_json_alike(tmp_path: Path) -> None:
    page, data = tmp_path / "x.html", tmp_path / "x.json"
    succeeds(
        *(
            "compress",
            DIGITS.model,
            tmp_path / "o.onnx",
            "--unit-ratio=0.3",
            "--data",
            DIGITS.calibration,
            "--compensate",
            "grail",
        ),
        *("--report", page, "--report", data),
    )
    report = json.loads(data.read_text())
    text = page.read_text(encoding="utf-8")
    assert text == report_page(report)
    for block in report["blocks"]:
        assert block["name"].replace(".", ".<wbr>").replace("_", "_<wbr>") in text
    assert report["refusals"][0]["reason"] in text
    assert onnxgrail.Report.from_json(data.read_text()).to_html() == text


def test_refusals_know_their_place(tmp_path: Path) -> None:
    data = tmp_path / "x.json"
    succeeds(
        "compress", DIGITS.model, tmp_path / "o.onnx", "--unit-ratio=0.3", "--compensate", "none", "--report", data
    )
    report = json.loads(data.read_text())
    nodes = len(onnx.load(DIGITS.model).graph.node)
    assert {r["node"]: r["position"] for r in report["refusals"]} == {"logits": nodes}
    assert all(0 <= block["span"][0] <= block["span"][1] < nodes for block in report["blocks"])


def test_curves_are_in_the_report_and_on_the_page(tmp_path: Path) -> None:
    page, data = tmp_path / "x.HTML", tmp_path / "x.json"
    succeeds(
        *(
            "compress",
            DIGITS.model,
            tmp_path / "o.onnx",
            "--unit-ratio=0.3",
            "--data",
            DIGITS.calibration,
            "--compensate",
            "none",
        ),
        *("--curves", "--samples", 32, "--report", page, "--report", data),
    )
    curves = json.loads(data.read_text())["allocation"]["curves"]
    assert {c["block"] for c in curves} == {b["name"] for b in json.loads(data.read_text())["blocks"]}
    for curve in curves:
        errors = [error for _, error in curve["points"]]
        assert curve["points"][0] == [0, 1.0]
        assert curve["points"][-1] == [curve["units"], 0.0]
        assert errors == sorted(errors, reverse=True)
        assert curve["effect"] >= 0
    assert "Error over width" in page.read_text(encoding="utf-8")


def test_an_inspection_is_written_as_a_page(tmp_path: Path) -> None:
    page = tmp_path / "i.html"
    succeeds("inspect", DIGITS.model, "--html", page)
    found = onnxgrail.inspect(DIGITS.model)
    assert page.read_text(encoding="utf-8") == inspection_page(json.loads(found.to_json()))


def test_nothing_to_compress_is_a_page_as_well(tmp_path: Path) -> None:
    model, page = tmp_path / "m.onnx", tmp_path / "x.html"
    onnx.save(nets.convnet(), model)
    words = [
        "compress",
        str(model),
        str(tmp_path / "o.onnx"),
        "--unit-ratio=0.3",
        "--include",
        "nothing is called so",
        "--report",
        str(page),
    ]
    result = run(*words)
    assert result.exit_code == 4, result.output
    assert "0 of " in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("words", "said"), [(["--html", "p.md"], ".html"), (["--report", "p"], ".html")])
def test_a_page_has_the_suffix_of_a_page(words: list[str], said: str) -> None:
    result = run("inspect", DIGITS.model, *words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_page_does_not_replace_the_model(tmp_path: Path) -> None:
    model = tmp_path / "m.html"
    model.write_bytes(Path(DIGITS.model).read_bytes())
    result = run("inspect", model, "--html", model)
    assert result.exit_code == 1
    assert "is the input" in result.stderr
    assert model.read_bytes() == Path(DIGITS.model).read_bytes()
