"""Help in groups, lines without a terminal, and tables on narrow ones."""

from __future__ import annotations

import io
import re

import click
import pytest

from onnxgrail.cli import main
from onnxgrail.cli.parts import help as _help
from onnxgrail.cli.parts import progress as _progress
from onnxgrail.cli.parts import render as _render
from onnxgrail.machine.progress import EXPECTED
from onnxgrail.recipe.table import GROUPS, OPTIONS
from tests.cli.standin import recorded
from tests.command import run

GROUPED = [name for name, command in main.commands.items() if isinstance(command, _help.Grouped)]


@pytest.mark.parametrize("name", GROUPED)
def test_every_option_is_in_a_group(name):
    options = [p for p in main.commands[name].params if isinstance(p, click.Option) and not p.hidden]
    own = [p.name for p in options if _help.group_of(p) == _help.OTHER]
    assert own == [] or name in {"bench", "demo", "export"}
    assert {p.name for p in options if p.name in OPTIONS} == {n for n, row in OPTIONS.items() if name in row.commands}


def test_help_shows_ten_options_and_help_all_every_one():
    short, full = run("compress", "--help").stdout, run("compress", "--help-all").stdout
    assert len(re.findall(r"^  (-\w, )?--", short, re.MULTILINE)) == 10 + 2  # and --help, --help-all
    for option in ("--ratio", "--data", "--output", "--device"):
        assert option in short
    assert "--cache-budget" not in short
    assert "--help-all" in short.rstrip().splitlines()[-1]
    shown = {p.opts[0] for p in main.commands["compress"].params if isinstance(p, click.Option) and not p.hidden}
    assert all(option in full for option in shown)
    groups = [line.rstrip(":") for line in full.splitlines() if re.fullmatch(r"\w.*:", line)]
    assert groups == list(GROUPS)


def test_lines_name_finished_stages_and_their_times():
    moments, said = iter([0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 6.0, 6.0, 6.99, 7.0, 10.0, 50.0, 60.0]), []
    show = _progress.StageLines(said.append, lambda: next(moments))
    assert _progress.EXPECTED == EXPECTED
    show("expected: about 1 min", 1, 1)  # at 0.5
    show("load", 0, 1)  # at 1.0
    show("load", 1, 1)
    show("calibrate", 0, 1)  # at 2.0
    show("walk", 0, 2)
    show("walk", 2, 2)
    show("calibrate", 1, 1)
    show("write", 0, 1)  # takes no time
    show("write", 1, 1)
    show("fit", 1, 40)  # at 10.0
    show("fit", 20, 40)  # at 50.0, after a long silence
    show("fit", 40, 40)
    assert said[:3] == ["[    0.5 s] expected: about 1 min", "[    1.5 s] load: 0.5 s", "[    6.0 s] calibrate: 4.0 s"]
    assert said[3:] == ["[   50.0 s] fit: 50 %, about 40 s left ...", "[   60.0 s] fit: 50.0 s"]


def test_lines_go_on_during_one_long_step():
    moments, said = iter([0.0, 1.0, 2.0, 20.0, 31.5, 50.0, 65.0, 70.0]), []
    show = _progress.StageLines(said.append, lambda: next(moments))
    show("allocate", 0, 1)  # at 1.0
    show("trying blocks", 1, 4)
    show.remind()
    show.remind()  # at 31.5
    show.remind()
    show.remind()  # at 65.0
    show("trying blocks", 4, 4)
    assert said == [
        "[   31.5 s] trying blocks: 25 %, about 88 s left ...",
        "[   65.0 s] trying blocks: 25 %, about 189 s left ...",
    ]


def test_without_a_terminal_stages_are_lines(monkeypatch):
    recorded(monkeypatch)
    assert "trace" not in run("compress", "m.onnx", "--quiet").stderr
    assert "trace" not in run("compress", "m.onnx", "--no-progress").stderr


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_lines_break_between_words_only(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    name = "a-very/long.name_that-does-not-fit-into-a-line"
    _render.say(f"  several words and then {name} and more words")
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= 30 or line.strip() == name for line in lines)
    assert lines[1].startswith("    ")


def test_names_in_tables_are_shortened_not_broken():
    rows = [["/model/layers.11/self_attn/query", "heads", "1,234"], ["head", "mlp", "5"]]
    found = _render.fitting(rows, ("block", "kind", "params"), 2, 40)
    assert found[0][0].startswith("…")
    assert found[0][0].endswith("self_attn/query")
    assert sum(len(cell) for cell in found[0]) <= 40
    assert found[1] == rows[1]
    assert _render.fitting(rows, ("block", "kind", "params"), 2, 140) == rows
