"""docs/extending.md is followed literally: its files and lines go into a copy of onnxgrail, then its commands are run.

A block is marked by the line before its fence: `file: PATH` is a new file, `line: REGISTRY` is inserted as the last
line of that dictionary in `registry.py`, and `then` is run after all of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.e2e import nets
from tests.pages import ROOT, Example, examples

BLOCKS = [
    block
    for block in examples((ROOT / "docs" / "extending.md").read_text(encoding="utf-8"))
    if not block.mark.startswith("<!-- not run") and block.language in {"bash", "python"}
]
THEN = """
import json, sys
from tests.pages import Example, run
assert "copied" in __import__("onnxgrail").__file__
for block in json.load(sys.stdin):
    run([Example(*block)])
"""
KINDS = {"selectors", "reducers", "compensate", "ops", "refine", "page", "kinds"}


def marked(word: str) -> list[tuple[str, Example]]:
    """Return what stands after a word in marks, with the blocks."""
    found = [(re.fullmatch(rf"<!-- {word}(?:: (\S+))? -->", block.mark), block) for block in BLOCKS]
    return [(match[1] or "", block) for match, block in found if match]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a folder with a copy of the package, as it is once installed."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "onnxgrail", tmp_path / "copied" / "onnxgrail", ignore=ignored)
    shutil.copytree(ROOT / "cli", tmp_path / "copied" / "onnxgrail" / "cli", ignore=ignored)
    return tmp_path / "copied"


def insert(registry: Path, name: str, line: str) -> None:
    """Insert a line at the end of a dictionary of the registry."""
    text = registry.read_text(encoding="utf-8")
    changed, count = re.subn(
        rf"(^{name} = Registry\(.*?)^(    }}\n\))", rf"\1        {line}\2", text, flags=re.M | re.S
    )
    assert count == 1, f"registry.py has no {name}"
    registry.write_text(changed, encoding="utf-8")


def test_every_block_says_what_it_is() -> None:
    assert len(marked("file")) + len(marked("line")) + len(marked("then")) == len(BLOCKS)
    folders = [{part for part in Path(path).parts if part in KINDS} for path, _ in marked("file")]
    assert Counter(kind for found in folders for kind in found) == dict.fromkeys(KINDS, 1)
    assert len(marked("line")) == len(KINDS) - 1  # a rule needs none
    assert all(block.code.count("\n") == 1 for _, block in marked("line"))


def test_one_file_and_one_line(copied: Path, tmp_path: Path) -> None:
    for path, block in marked("file"):
        assert not (ROOT / path).exists()
        (copied / path).write_text(block.code, encoding="utf-8")
        shutil.copy(copied / path, tmp_path)  # next to the program
    for name, block in marked("line"):
        insert(copied / "onnxgrail" / "registry.py", name, block.code)
    onnx.save(nets.mlp(), tmp_path / "model.onnx")
    for name, seed in (("calib", 0), ("heldout", 1)):
        np.savez(tmp_path / f"{name}.npz", **nets.vectors(seed=seed))
    (samples,) = nets.vectors().values()
    np.savetxt(tmp_path / "rows.csv", samples, delimiter=",")
    torch = importlib.util.find_spec("torch") is not None
    blocks = [(block.language, block.code, "<!-- run -->", block.line) for _, block in marked("then")]
    blocks = [one for one, (needed, _) in zip(blocks, marked("then"), strict=True) if torch or needed != "torch"]
    places = [str(copied), str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", THEN],
        input=json.dumps(blocks),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
