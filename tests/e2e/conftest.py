"""What many of these tests begin with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.e2e import nets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model `m.onnx` and data `d.npz` for it."""
    onnx.save(nets.mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", **nets.vectors())
    return tmp_path
