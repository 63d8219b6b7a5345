"""The pages in `docs/` are run, and those that are generated are up to date.

Some have tests of their own, since they need files of many kinds.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import click
import pytest

from onnxgrail.cli import main
from tests.pages import MARK, ROOT, Example, commands, examples, furnish, run, sections

DOCS = ROOT / "docs"
CALL = re.compile(
    r'\bonnxgrail\.(?:compress|apply|frontier|refine_model)\(\s*"[^"]+",\s*"([^"]+\.onnx)"((?:[^()]|\([^()]*\))*)\)'
)
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
WHOLE = {
    "quickstart.md",
    "refine.md",
    "ic.md",
    "web.md",
    "text.md",
    "llm.md",
    "edge.md",
    "ci.md",
}  # their sections go on from each other
# data.md: test_data_docs.py.  export.md: export/test_docs_export.py.  extending.md: test_extending.py.  deploy.md and
# adding-an-op.md: test_docs.py, that holds the code of the latter to ours.
ELSEWHERE = {"data.md", "deploy.md", "export.md", "extending.md", "adding-an-op.md"}
GENERATED = {f"{name}.md": f"{name}_page" for name in ("api", "choosing", "cli", "loss", "ops", "options")}
GENERATED["real-models.md"] = "real_models_page"


def scenarios() -> list[object]:
    found: list[object] = []
    for name, text in PAGES.items():
        if name in ELSEWHERE:
            continue
        parts = [("all", examples(text))] if name in WHOLE else sections(text)
        for title, blocks in parts:
            if any(block.mark.startswith("<!-- run") for block in blocks):
                found.append(pytest.param(blocks, id=f"{name.removesuffix('.md')}: {title}"))
    return found


@pytest.mark.parametrize("blocks", scenarios())
def test_commands_and_examples(blocks: list[Example], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    furnish(tmp_path, blocks)
    monkeypatch.chdir(tmp_path)
    torch = all(b.mark == "<!-- run: torch -->" for b in blocks if b.mark.startswith("<!-- run"))
    if torch and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    assert run(blocks) > 0


@pytest.mark.parametrize("name", ["README.md", *sorted(PAGES.keys() - ELSEWHERE)])
def test_every_command_is_run_or_says_why_not(name: str) -> None:
    text = PAGES[name] if name in PAGES else (ROOT / name).read_text(encoding="utf-8")
    assert text.count("\n```") == 2 * len(examples(text)), "a fence is not closed, or stands inside another"
    for block in examples(text):
        if re.search(r"onnxgrail|^(pip|python|make|torchrun) ", block.code, re.MULTILINE) and block.language in {
            "bash",
            "python",
            "",
        }:
            assert MARK.fullmatch(block.mark), f"{name}, line {block.line}: mark this block (see tests/pages.py)"
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"^ {4,}(onnxgrail|pip|python) ", outside, re.MULTILINE), "a command outside of a fence"


@pytest.mark.parametrize("name", ["README.md", *sorted(PAGES.keys() - {"faq.md"})])  # a question there is read alone
def test_no_block_writes_a_file_that_one_above_has_written(name: str) -> None:
    """A reader runs them one after another in one folder."""
    text = PAGES[name] if name in PAGES else (ROOT / name).read_text(encoding="utf-8")
    blocks = (block for block in examples(text) if block.mark.startswith("<!-- run"))
    files = [file for block in blocks for file in written(block)]
    assert sorted({file for file in files if files.count(file) > 1}) == []


def written(block: Example) -> list[str]:
    """Return the models and reports that a block writes where none may be."""
    if block.language == "python":
        return [call[1] for call in CALL.finditer(block.code) if "force=True" not in call[2]]
    found: list[str] = []
    for words in commands(block.code):
        command = main.get_command(click.Context(main), words[1]) if words[0] == "onnxgrail" and words[1:] else None
        if command is None:
            continue
        options, *_ = command.make_parser(click.Context(command)).parse_args(words[2:])
        if not options.get("force") and not options.get("dry_run"):
            values = (options.get(key) for key in ("output", "out", "small", "report"))
            found += [one for value in values for one in (value if isinstance(value, list) else [value]) if one]
    return [file for file in found if isinstance(file, str)]


@pytest.mark.parametrize("name", ["README.md", *PAGES])
def test_commands_of_other_programs_say_why_they_are_not_run(name: str) -> None:
    text = PAGES[name] if name in PAGES else (ROOT / name).read_text(encoding="utf-8")
    for block in examples(text):
        assert block.language != "bash" or MARK.fullmatch(block.mark), f"{name}, line {block.line}: mark this block"


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_up_to_date(name: str) -> None:
    generator = DOCS / f"{GENERATED[name]}.py"
    assert PAGES[name] == script(generator).page(), f"run `python docs/{generator.name}`"


def test_the_first_table_of_the_readme_shows_models_of_others() -> None:
    generator = script(DOCS / "real_models_page.py")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == generator.filled(readme), "run `python docs/real_models_page.py`"


def test_the_picture_of_the_readme_shows_the_result_of_the_demo() -> None:
    generator = script(DOCS / "before_after.py")
    drawn = generator.picture(json.loads(generator.RESULT.read_text(encoding="utf-8")))
    assert generator.PICTURE.read_text(encoding="utf-8") == drawn, "run `python docs/before_after.py`"


def test_every_option_is_on_the_page_of_the_command_line() -> None:
    from onnxgrail.cli import main

    for name, command in main.commands.items():
        part = PAGES["cli.md"].partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                assert f"`{parameter.opts[-1]}`" in part, f"{name} {parameter.opts[-1]}"


def test_every_public_name_is_on_the_page_of_the_library() -> None:
    import onnxgrail

    missing = [n for n in onnxgrail.__all__ if n[0] != "_" and not re.search(rf"(## |`){n}\b", PAGES["api.md"])]
    assert not missing


def test_every_question_has_a_command() -> None:
    parts = sections(PAGES["faq.md"])[1:]
    assert len(parts) >= 20
    for title, blocks in parts:
        assert blocks, title


def test_figures_on_the_page_of_questions_are_measured() -> None:
    large = json.loads((ROOT / "bench" / "results" / "large_model_8g.json").read_text(encoding="utf-8"))
    assert f"{large['bytes_before'] / 1e9:.1f} GB took {large['peak_bytes']['RssAnon'] / 1e9:.1f} GB" in PAGES["faq.md"]
    few = json.loads((ROOT / "bench" / "results" / "large_model_8g_int4.json").read_text(encoding="utf-8"))
    assert few["bytes_before"] == large["bytes_before"]
    took = f"{few['peak_bytes']['RssAnon'] / 1e9:.1f} GB and {few['seconds'] / 60:.0f} minutes"
    assert f"it took {took}" in PAGES["faq.md"]
