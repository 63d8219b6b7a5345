"""The notebooks of the documentation run from top to bottom, and hold no outputs."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "docs" / "notebooks").glob("*.ipynb"))
LIMIT = 240  # seconds

every_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def test_there_are_two() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["cnn", "encoder"]


@every_notebook
def test_nothing_but_text_and_code_is_committed(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert [cell["source"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
    assert notebook.stat().st_size < 10_000


@every_notebook
def test_it_runs(notebook: Path, tmp_path: Path) -> None:
    for needed in ("nbmake", "ipykernel"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install '.[test]'")
    shutil.copy(notebook, tmp_path)
    call = [sys.executable, "-m", "pytest", "--nbmake", notebook.name, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert (tmp_path / "small.onnx").is_file()
