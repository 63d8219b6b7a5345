"""README and deploy.md are run: marked commands and examples work on an embedded model, and lists match the program.

A block is marked by the line before its fence: `<!-- run -->`, or `<!-- not run: why -->`.  A block that mentions
onnxgrail and has neither mark fails, so nothing is left out by accident.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from bench import few_bits, one_budget, shipping
from tests.command import run
from tests.pages import SAMPLES, short_times, small

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {"README": README, "deploy": (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")}
FENCE = re.compile(
    r"(?:^(?P<mark><!--[^\n]*-->)\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
DATA = {
    "calib.npz": "models/data/digits_resnet.calib.npz",
    "heldout.npz": "models/data/digits_resnet.heldout.npz",
}
LIMIT = 120  # seconds a command may take


class Example(NamedTuple):
    language: str
    code: str
    mark: str
    line: int


def examples(page: str) -> list[Example]:
    text = PAGES[page]
    return [
        Example(match["language"], match["code"], match["mark"] or "", text.count("\n", 0, match.start("language")) + 1)
        for match in FENCE.finditer(text)
    ]


def runnable(language: str, pages: tuple[str, ...] = ("README",)) -> list[object]:
    chosen = [(p, e) for p in pages for e in examples(p) if e.language == language and e.mark == "<!-- run -->"]
    return [pytest.param(e.code, id=f"{p}-line-{e.line}") for p, e in chosen]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the files that the pages use; small ones, since the commands are tested, no numbers."""
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "examples")
    (tmp_path / "model.onnx").write_bytes(small("digits_resnet"))
    for name, source in DATA.items():
        with np.load(ROOT / source) as file:
            np.savez(tmp_path / name, **{key: file[key][:SAMPLES] for key in file.files})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commands(code: str) -> list[list[str]]:
    """The lines of a shell block, comments and continuation lines resolved."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("page", PAGES)
def test_every_example_is_marked(page: str) -> None:
    fences = PAGES[page].count("\n```")
    assert fences == 2 * len(examples(page)), "a code block has no language or an unreadable fence"
    for example in examples(page):
        if "onnxgrail" in example.code and example.language in {"bash", "python"}:
            known = re.fullmatch(r"<!-- (run|not run: .+) -->", example.mark)
            assert known, f"{page} line {example.line}: mark this block `run` or `not run: why`"


def test_readme_shows_commands_and_the_library() -> None:
    assert runnable("bash")
    assert runnable("python")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("code", runnable("bash"))
def test_commands(code: str) -> None:
    for words in commands(code):
        assert words[0] == "onnxgrail", f"only onnxgrail commands can be run here: {shlex.join(words)}"
        done = run(*words[1:], *short_times(words))
        assert done.exit_code == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"


def test_commands_of_deploy_md(folder: Path) -> None:
    """In one folder and in order: later ones use what earlier ones wrote."""
    blocks = [e for e in examples("deploy") if e.language == "bash" and e.mark == "<!-- run -->"]
    assert blocks
    for words in [words for block in blocks for words in commands(block.code)]:
        assert words[0] == "onnxgrail", f"only onnxgrail commands can be run here: {shlex.join(words)}"
        done = run(*words[1:], *short_times(words))
        assert done.exit_code == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    assert (folder / "again.onnx").read_bytes() == (folder / "small.onnx").read_bytes()


@pytest.mark.parametrize("bench", [few_bits, one_budget, shipping])
def test_tables_of_deploy_md_are_the_stored_results(bench: Any) -> None:
    stored = json.loads(bench.RESULTS.read_text(encoding="utf-8"))
    tables = bench.markdown(stored if isinstance(stored, list) else stored["rows"]).split("\n\n")
    assert [table for table in tables if table not in PAGES["deploy"]] == []


def test_stored_results_of_few_bits_hold_what_is_promised() -> None:
    """Half of the loss of rounding to nearest, and at a size less loss than any pair of pruning and rounding."""
    rows = json.loads(few_bits.RESULTS.read_text(encoding="utf-8"))["rows"]
    lost = {(row["model"], row["way"]): row for row in rows}
    llama = {way: lost["char_llama", way]["perplexity_increase"] for way in few_bits.WAYS}
    assert llama["onnxgrail int4"] <= 0.5 * min(llama["onnxgrail int4, nearest"], llama["MatMulNBits rtn"])
    ours, nearest = (lost["minilm", way]["one_minus_cosine"] for way in ("onnxgrail int4", "MatMulNBits rtn"))
    assert ours <= 0.6 * nearest
    for name in ("digits_resnet", "digits_vit"):
        assert lost[name, "onnxgrail int4"]["right"] >= lost[name, "dense"]["right"] - 1
    rows = json.loads(one_budget.RESULTS.read_text(encoding="utf-8"))["rows"]
    for name, shares in one_budget.SHARES.items():
        loss = {
            row["way"]: row[one_budget.LOSS[name]]
            for row in rows
            if (row["model"], row["share"]) == (name, shares[-1])
            if row.get("met")
        }
        assert loss["bits and widths"] < min(loss[way] for way in one_budget.PAIRS)


@pytest.mark.parametrize("code", runnable("python", tuple(PAGES)))
def test_library(code: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """The committed result of the demo."""
    data: dict[str, Any] = json.loads((ROOT / "bench/results/demo.json").read_text(encoding="utf-8"))
    return data


def test_the_table_is_the_result_of_the_demo(results: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "bench" / "readme_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.filled(README, results) == README, "run `python bench/readme_table.py`"


def test_the_result_covers_the_embedded_models_and_names_its_origin(results: dict[str, Any]) -> None:
    from onnxgrail import models

    wanted = [(0.0, ""), *((ratio, way) for ratio in (0.3, 0.5) for way in ("none", "grail", "best"))]
    for name in models.names():
        assert [(r["ratio"], r["compensate"]) for r in results["rows"] if r["model"] == name] == wanted
    assert results["date"]
    assert results["machine"]
    assert {"onnxgrail", "onnxruntime", "numpy", "python"} <= set(results["environment"])
    assert all(row["file"] is None for row in results["rows"]), "a path of the machine that measured"


def test_the_result_can_be_repeated(results: dict[str, Any]) -> None:
    import onnxgrail

    again = onnxgrail.demo(models=("digits_resnet",), ratios=(0.5,), repeats=2)
    known = {(r["model"], r["ratio"], r["compensate"]): r for r in results["rows"]}
    for row in again.rows:
        before = known[row.model, row.ratio, row.compensate]
        assert (row.params, row.macs) == (before["params"], before["macs"])
        assert row.score == pytest.approx(before["score"], abs=0.02)  # 400 images; processors round differently
    dense, plain, published, best = (row.score for row in again.rows)
    assert plain + 0.3 < published <= best + 0.01 <= dense + 0.02


def test_readme_lists_exactly_the_commands() -> None:
    import click

    from onnxgrail.cli import main

    listed = re.findall(r"^\| `onnxgrail (\w+)", README, re.MULTILINE)
    assert sorted(listed) == sorted(main.list_commands(click.Context(main)))


def test_exit_codes_in_the_readme_are_those_of_the_help() -> None:
    from onnxgrail.cli import main

    codes = str(main.help).partition("Exit codes:")[2]
    assert re.findall(r"^\| (\d) \|", README, re.MULTILINE) == re.findall(r"\b(\d) ", codes)


def test_code_in_the_guide_is_the_code_of_the_program() -> None:
    guide = (ROOT / "docs" / "adding-an-op.md").read_text(encoding="utf-8")
    places = [*(ROOT / "onnxgrail" / "graph" / "ops").rglob("*.py"), *(ROOT / "tests" / "contract").glob("*.py")]
    lines = {line.strip() for place in places for line in place.read_text(encoding="utf-8").splitlines()}
    blocks = re.findall(r"^```python\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    stale = [line for block in blocks for line in block.splitlines() if line.strip() not in lines]
    assert not stale, f"docs/adding-an-op.md shows code that has changed: {stale}"


def test_named_files_exist() -> None:
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:  # links and paths in all of them
        text = document.read_text(encoding="utf-8")
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
        paths = re.findall(r"`((?:onnxgrail|cli|models|bench|tests|docs)/[\w./]*)`", text)
        missing = [p for p in links if not (document.parent / p).exists()]
        missing += [p for p in paths if not (ROOT / p).exists()]
        assert not missing, f"{document.name}: {missing}"


def test_the_readme_is_short_and_begins_with_what_it_is() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    command = next(n for n, line in enumerate(lines) if line.startswith("onnxgrail compress"))
    table = lines.index("<!-- real:begin -->")
    assert command < table < 20
