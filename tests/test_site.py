"""The site of `mkdocs.yml`: every page has its place, it builds without a warning, it loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//|url\([\"']?https?:")


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_has_its_place() -> None:
    placed = re.findall(r"^ +- .*: (\S+\.md)$", CONFIG.partition("\nnav:")[2], re.MULTILINE)
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert sorted(placed) == sorted([*pages, *hooks().PAGES.values(), *hooks().NOTEBOOKS])


@pytest.mark.parametrize(
    ("text", "folder", "wanted"),
    [
        ("[a](docs/data.md#text)", "", "[a](data.md#text)"),
        ("![a](img/report.png)", "docs", "![a](img/report.png)"),
        ("[a](../SECURITY.md)", "docs", "[a](security.md)"),
        ("see [LICENSE](LICENSE).", "", "see LICENSE."),
        ("[a](notebooks/cnn.ipynb)", "docs", "[a](notebooks/cnn.md)"),
        ("[a](https://arxiv.org/abs/1) [b](#c)", "docs", "[a](https://arxiv.org/abs/1) [b](#c)"),
    ],
)
def test_links_follow(text: str, folder: str, wanted: str) -> None:
    assert hooks().relinked(text, folder) == wanted


def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for needed in ("mkdocs", "material"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip("mkdocs-material is not installed: pip install '.[docs]'")
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="site.css"' in home
    assert (tmp_path / "site" / "site.css").is_file()
    for path in [*(tmp_path / "site").rglob("*.html"), *(tmp_path / "site").rglob("*.css")]:
        found = LOADED.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.name}: {found and found[0]}"
