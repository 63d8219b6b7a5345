"""Fixtures that many of these tests use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

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
