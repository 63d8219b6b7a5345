"""The layout of the code stays within its limits."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from bench.house import measure

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 4 * 2**20  # bytes of a file in git
OPEN = {"lines": 1}
"""Limits that do not hold yet, and how many places are beyond them: these numbers only fall."""


def test_limits() -> None:
    found = {name: one["beyond"] for name, one in measure().items()}
    assert {name: beyond for name, beyond in found.items() if len(beyond) > OPEN.get(name, 0)} == {}


@pytest.mark.parametrize("folder", ["onnxgrail", "cli", "tests", "bench", "docs"])
def test_docstrings_name_or_tell_instead_of_asking(folder: str) -> None:
    asking = re.compile(r'"""(What|Whether|Where|Who|How) ')
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    assert [str(path) for path in files if asking.search(path.read_text(encoding="utf-8"))] == []


def test_no_large_file_is_in_git() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    assert paths
    assert [str(path) for path in paths if path.is_file() and path.stat().st_size > LARGEST] == []
