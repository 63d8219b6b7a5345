"""docs/export.md is run, where torch and transformers are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from onnxgrail.cli import export as command
from onnxgrail.cli import main

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^<!-- run -->\n```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_options_of_the_page_exist() -> None:
    known = {name for p in command.params if isinstance(p, click.Option) for name in (*p.opts, *p.secondary_opts)}
    said = set(re.findall(r"--[a-z][a-z-]+", PAGE)) - {"--ratio"}
    assert said <= known, said - known
    assert len(re.findall("```bash", PAGE)) == len(BLOCKS) + PAGE.count("<!-- not run: ")


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    lib = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    source = re.search(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert source is not None
    Path("net.py").write_text(source[1])
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    lib.BertModel(lib.BertConfig(**sizes, vocab_size=50)).save_pretrained("bert")
    for line in (line for block in BLOCKS for line in block.splitlines()):
        program, *words = shlex.split(line)
        assert program == "onnxgrail"
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, f"{line}\n{done.stderr}"
