"""Messages of `onnxgrail export` without torch."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from onnxgrail.cli import export as command
from onnxgrail.cli import main
from onnxgrail.errors import ModelError
from onnxgrail.exporting import call, sources, writers


def test_names_in_the_help_are_those_of_the_library() -> None:
    choices = {p.name: tuple(p.type.choices) for p in command.params if isinstance(p.type, click.Choice)}
    wanted = {"dtype": call.DTYPES, "exporter": writers.EXPORTERS, "attention": writers.ATTENTIONS}
    assert choices == wanted
    assert next(p.default for p in command.params if p.name == "opset") == call.OPSET


WITHOUT = """
import sys
sys.modules["torch"] = None
from onnxgrail.cli import main
main(["export", "net.py:net", "net.onnx"])
"""


def test_torch_is_named_when_it_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Error: export needs torch, which is not installed. Run: pip install 'onnxgrail[torch]'"
    ]


def test_what_an_import_fails_of_is_told() -> None:
    words = r"cannot load t:m: Could not import M \(RuntimeError: no operator x\)$"
    with pytest.raises(ModelError, match=words), sources.loading("t:m"):
        raise ImportError("Could not import M.\nMore") from RuntimeError("no operator x")


@pytest.mark.parametrize("text", ["x", "x:batch", "x:0=", "x:a=b", ":0=b", "x:0=1"])
def test_axes_that_cannot_be_read(text: str) -> None:
    done = CliRunner().invoke(main, ["export", "net.py:net", "net.onnx", "--dynamic", text])
    assert done.exit_code == 2
    assert "is not NAME:0=batch,1=sequence" in done.stderr


def test_tolerance_without_the_check_is_wrong_usage() -> None:
    done = CliRunner().invoke(main, ["export", "net.py:net", "net.onnx", "--no-check", "--tolerance", "1"])
    assert done.exit_code == 2
