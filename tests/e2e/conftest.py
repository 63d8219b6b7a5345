"""Fixtures that many of these tests use."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.e2e import nets

EVIL = """
import pathlib
(pathlib.Path(__file__).parent / "RAN").mkdir(exist_ok=True)
from onnxgrail_trust_feeds import feeds as f
"""
FEEDS = "import numpy as np\ndef feeds():\n    yield {'x': np.random.rand(40, 12).astype(np.float32)}\n"

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model `m.onnx` and data `d.npz` for it."""
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **nets.vectors())
    return tmp_path


@pytest.fixture
def trap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder with a file `evil.py`; `RAN` appears where it is run."""
    (folder / "evil.py").write_text(EVIL)
    (folder / "onnxgrail_trust_feeds.py").write_text(FEEDS)
    monkeypatch.chdir(folder)
    yield folder
    sys.modules.pop("onnxgrail_trust_feeds", None)


def program() -> str | None:
    named = os.environ.get("ONNXGRAIL_BROWSER")
    return named or next((path for name in PROGRAMS if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return Chromium; ONNXGRAIL_BROWSER names its program if it is not on the path."""
    path = program()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(PROGRAMS)} is on the path, and ONNXGRAIL_BROWSER names none")
    from playwright.sync_api import sync_playwright  # in the extra `test`: a lack of it is no reason to skip

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A perceptron with matrices of 24 to 96 inputs, with biases inside and beside the products."""
    path = tmp_path_factory.mktemp("bits") / "m.onnx"
    onnx.save(nets.mlp((24, 96, 80, 64, 10)), path)
    return path
