"""The main commands work without what only Linux or Unix has: locks, unnamed files, `/proc`, signals, `fork`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx

from tests.e2e import nets

HERE = Path(__file__).parent


def run(folder: Path, *command: str) -> str:
    line = [sys.executable, HERE / "elsewhere.py", *command]
    done = subprocess.run(line, check=False, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_main_commands_need_no_linux(tmp_path: Path) -> None:
    onnx.save(nets.mlp(), tmp_path / "in.onnx")
    np.savez(tmp_path / "data.npz", **nets.vectors(64))
    asked = ("in.onnx", "--data", "data.npz", "--ratio", "0.3", "--quiet")
    run(tmp_path, "compress", *asked[:1], "out.onnx", *asked[1:], "--report", "r.json", "--resume", "steps")
    run(tmp_path, "compress", *asked[:1], "int8.onnx", *asked[1:], "--quantize", "int8", "--save-as-external-data")
    run(tmp_path, "apply", "r.json", "in.onnx", "again.onnx", "--data", "data.npz", "--quiet")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "out.onnx").read_bytes()
    assert "blocks" in run(tmp_path, "inspect", "in.onnx", "--json")
    assert "outputs" in run(tmp_path, "compare", "in.onnx", "out.onnx", "--data", "data.npz", "--json")
