"""`onnxgrail report`: a report printed again, two side by side, pages of both."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxgrail
from onnxgrail.report.page import pair_page, report_page
from tests.command import run
from tests.e2e import nets


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the reports of two runs, and what the first one printed."""
    place = tmp_path_factory.mktemp("reports")
    onnx.save(nets.mlp(), place / "m.onnx")
    np.savez(place / "c.npz", **nets.vectors())
    for name, words in (("a", ["--ratio=0.3"]), ("b", ["--ratio=0.5", "--compensate=grail", "--include=.*"])):
        model, data = place / "m.onnx", place / "c.npz"
        done = run(
            "compress", model, place / f"{name}.onnx", *words, "--data", data, "--report", place / f"{name}.json"
        )
        assert done.exit_code == 0, done.output
        (place / f"{name}.txt").write_text(done.stdout)
    return place


def test_a_report_is_printed_as_the_run_has_printed_it(folder):
    again = run("report", folder / "a.json")
    assert (again.exit_code, again.stdout) == (0, (folder / "a.txt").read_text())


def test_a_report_becomes_the_page_that_the_run_would_have_written(folder, tmp_path):
    page = tmp_path / "a.html"
    assert run("report", folder / "a.json", "-o", page).exit_code == 0
    assert page.read_text(encoding="utf-8") == report_page(json.loads((folder / "a.json").read_text()))


def test_two_reports_are_printed_with_what_differs(folder):
    both = run("report", folder / "a.json", folder / "b.json")
    assert both.exit_code == 0
    one, two = (json.loads((folder / f"{name}.json").read_text()) for name in "ab")
    lines = [line.split() for line in both.stdout.splitlines()]
    params = [
        f"{size:,}" for size in (one["model"]["params_before"], *(r["model"]["params_after"] for r in (one, two)))
    ]
    assert ["Parameters", *params] in [words[:4] for words in lines]
    assert ["--ratio", "0.3", "0.5"] in lines
    assert ["--compensate", "-", "grail"] in lines
    differing = [x["name"] for x, y in zip(one["blocks"], two["blocks"], strict=True) if x["kept"] != y["kept"]]
    assert differing
    assert [words[0] for words in lines if words[1:2] == ["mlp"]] == differing


def test_two_reports_are_one_page_that_needs_force_to_replace_a_file(folder, tmp_path):
    page = tmp_path / "diff.html"
    page.write_text("mine")
    words = ("report", folder / "a.json", folder / "b.json", "-o", page)
    refused = run(*words)
    assert (refused.exit_code, page.read_text()) == (1, "mine")
    assert "Use --force to replace it" in refused.stderr
    assert run(*words, "--force").exit_code == 0
    data = [json.loads((folder / f"{name}.json").read_text()) for name in "ab"]
    assert page.read_text(encoding="utf-8") == pair_page(*data)


def test_what_is_read_is_not_replaced(folder, tmp_path):
    for source in ("a.json", "m.onnx", "b.json"):
        page = tmp_path / f"{source}.html"
        os.link(folder / source, page)
        before = page.read_bytes()
        done = run("report", folder / "a.json", folder / "b.json", "-o", page, "--force")
        assert done.exit_code == 1, source
        assert "What is read is never replaced" in done.stderr
        assert page.read_bytes() == before


def test_a_page_has_the_suffix_of_a_page(folder, tmp_path):
    done = run("report", folder / "a.json", "-o", tmp_path / "a.pdf")
    assert done.exit_code == 2
    assert "is written as .html" in done.stderr
    assert list(tmp_path.iterdir()) == []


BROKEN = {
    "no JSON": (b"{", "is not a report"),
    "no text": (b"\xff\xfe", "is not a report"),
    "another schema": (b'{"schema": 2}', "is not a report of schema 1: got 2"),
    "a frontier": (b'{"schema": 1, "model": {}, "points": []}', "is not a report of `compress` or `refine`: it has "),
    "a list": (b"[]", "is not a report of schema 1: got 'list'"),
    "deep": (b"[" * 100_000, "is not a report"),
    "nothing in it": (b'{"schema": 1}', "is not a report of `compress` or `refine`"),
    "numbers for words": (b'{"schema": 1, "model": 3, "blocks": 4, "recipe": 5}', "the report is damaged"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_report_is_an_error_in_one_line(name, folder, tmp_path):
    content, said = BROKEN[name]
    broken = tmp_path / "x.json"
    broken.write_bytes(content)
    page = tmp_path / "x.html"
    for words in ([broken], [folder / "a.json", broken], [broken, "-o", page], [broken, folder / "b.json", "-o", page]):
        done = run("report", *words)
        assert done.exit_code == 1, words
        assert said in done.stderr
        assert sum(line.startswith("Error: ") for line in done.stderr.splitlines()) == 1
        assert "Traceback" not in done.stderr
        assert not page.exists()


@pytest.mark.parametrize("words", [[], ["a", "b", "c"]])
def test_one_or_two_reports(words):
    assert run("report", *words).exit_code == 2


def test_a_missing_file_is_named(tmp_path):
    done = run("report", tmp_path / "none.json")
    assert done.exit_code == 1
    assert "none.json" in done.stderr
    with pytest.raises(onnxgrail.ModelError, match="is a folder"):
        onnxgrail.Report.read(tmp_path)


def test_a_pair_can_be_saved_as_json(folder, tmp_path):
    one, two = (onnxgrail.Report.read(folder / f"{name}.json") for name in "ab")
    one.beside(two).save(tmp_path / "pair.json")
    told = json.loads((tmp_path / "pair.json").read_text())
    assert (told["a"], told["b"]) == tuple(json.loads(Path(folder / f"{n}.json").read_text()) for n in "ab")
