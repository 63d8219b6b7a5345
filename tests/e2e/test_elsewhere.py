"""The main commands work without what only Linux or Unix has: locks, unnamed files, `/proc`, signals, `fork`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx

from tests.e2e import nets

HERE = Path(__file__).parent


def test_main_commands_need_no_linux(tmp_path: Path) -> None:
    onnx.save(nets.mlp(), tmp_path / "in.onnx")
    np.savez(tmp_path / "data.npz", **nets.vectors(64))
    asked = ["--data", "data.npz", "--ratio", "0.3", "--quiet"]
    commands = [
        ["compress", "in.onnx", "out.onnx", *asked, "--report", "r.json", "--resume", "steps"],
        ["compress", "in.onnx", "int8.onnx", *asked, "--quantize", "int8", "--save-as-external-data"],
        ["apply", "r.json", "in.onnx", "again.onnx", "--data", "data.npz", "--quiet"],
        ["inspect", "in.onnx"],
        ["compare", "in.onnx", "out.onnx", "--data", "data.npz", "--json"],
    ]
    line = [sys.executable, HERE / "elsewhere.py", json.dumps(commands)]
    done = subprocess.run(line, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "out.onnx").read_bytes()
    assert (tmp_path / "int8.onnx").is_file()
    assert '"outputs"' in done.stdout
