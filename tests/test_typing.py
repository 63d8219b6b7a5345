"""Keywords of the library have types: a checker of a user's program knows them, and they are those of the recipe."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import onnxgrail
from onnxgrail.methods.refine.needed import USED
from onnxgrail.recipe.choices import Choices, Options, RefineChoices

ROOT = Path(__file__).resolve().parents[1]
GOOD = """
import numpy as np
import onnxgrail

data = {"x": np.zeros((4, 3), np.float32)}
result = onnxgrail.compress("m.onnx", ratio=0.3, blocks=("mlp",), data=data, include=None, target_size=None)
onnxgrail.compress("m.onnx", "o.onnx", blocks="mlp,conv", target_macs="60%", grasp_layers=["a"], image_mean=0.5)
onnxgrail.refine_model("s.onnx", reference="m.onnx", refine="laco", held_out=64, sequence_length=128)
onnxgrail.apply("r.yaml", "m.onnx", force=True, ratio=0.5)
print(result.report.data["model"])
"""
BAD = """
import onnxgrail

onnxgrail.compress("m.onnx", rato=0.3)
onnxgrail.compress("m.onnx", ratio="0.3")
onnxgrail.refine_model("s.onnx", reference="m.onnx", ratio=0.3)
onnxgrail.apply("r.yaml", "m.onnx", forced=True)
"""


def test_the_keywords_are_the_recipe() -> None:
    fields = {field.name for field in dataclasses.fields(onnxgrail.Recipe)}
    assert set(Choices.__annotations__) == fields
    assert set(RefineChoices.__annotations__) == USED < fields


def test_apply_hands_on_what_compress_takes() -> None:
    named = set(inspect.signature(onnxgrail.compress).parameters) - {"model", "output", "data", "held_out", "choices"}
    assert set(Options.__annotations__) - set(Choices.__annotations__) == named


def checked(text: str, folder: Path) -> list[str]:
    """Return what strict mypy says of a program."""
    (folder / "user.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--config-file", "pyproject.toml", folder / "user.py"],
        cwd=ROOT,  # whose cache `make lint` has filled
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert not done.stderr, done.stderr
    return [line.partition("user.py:")[2] for line in done.stdout.splitlines() if ": error: " in line]


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_checker_knows_the_keywords(tmp_path: Path) -> None:
    assert checked(GOOD, tmp_path) == []
    found = checked(BAD, tmp_path)
    assert [int(line.split(":")[0]) for line in found] == [4, 5, 6, 7], found
    for line, words in zip(
        found, ('"rato" for "compress"', '"ratio" to "compress"', '"ratio" for', '"forced" for'), strict=True
    ):
        assert words in line
