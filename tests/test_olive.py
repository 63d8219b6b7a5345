"""The pass of `integrations/olive`, run by `olive run` itself.  Skipped where olive-ai is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxgrail
from tests.e2e import nets

PLACE = Path(__file__).resolve().parents[1] / "integrations" / "olive"
LIMIT = 240  # seconds

pytestmark = pytest.mark.skipif(importlib.util.find_spec("olive") is None, reason="olive-ai is not installed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, its calibration data, and the package configuration that the integration prints."""
    onnx.save(nets.mlp(), tmp_path / "model.onnx")
    np.savez(tmp_path / "calib.npz", **nets.vectors())
    printed = call([sys.executable, "-m", "onnxgrail_olive"], tmp_path)
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "package.json").write_text(printed.stdout)
    return tmp_path


def call(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OLIVE_DISABLE_TELEMETRY": "1",
        "PYTHONPATH": os.pathsep.join([str(PLACE), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT, env=environment
    )


def olive(folder: Path, **passes: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run passes on the model of a folder, by the command of the how-to page."""
    model = {"type": "ONNXModel", "model_path": "model.onnx"}
    config = {"input_model": model, "passes": passes, "output_dir": "out", "cache_dir": "cache"}
    (folder / "run.json").write_text(json.dumps(config))
    words = ["run", "--config", "run.json", "--package-config", "package.json"]
    return call([sys.executable, "-m", "olive", *words], folder)


def test_it_writes_what_the_library_writes(folder: Path) -> None:
    options = {"compensate": "grail", "report": str(folder / "r.json")}
    done = olive(folder, grail={"type": "OnnxGrail", "ratio": 0.5, "data": "calib.npz", "options": options})
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = (folder / "out").rglob("*.onnx")
    model, data = folder / "model.onnx", folder / "calib.npz"
    onnxgrail.compress(model, folder / "ours.onnx", ratio=0.5, data=data, compensate="grail")
    ours = {w.name: onnx.numpy_helper.to_array(w) for w in onnx.load(folder / "ours.onnx").graph.initializer}
    theirs = {w.name: onnx.numpy_helper.to_array(w) for w in onnx.load(written).graph.initializer}
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert json.loads((folder / "r.json").read_text())["recipe"]["compensate"] == "grail"


def test_data_of_olive_and_a_pass_of_olive_afterwards(folder: Path) -> None:
    ((name, array),) = nets.vectors().items()
    (folder / "raw" / name).mkdir(parents=True)
    for number in range(8):
        array[8 * number : 8 * number + 8].tofile(folder / "raw" / name / f"{number}.bin")
    params = {"data_dir": "raw", "input_names": [name], "input_shapes": [[8, *array.shape[1:]]]}
    data = {"name": "d", "type": "RawDataContainer", "load_dataset_config": {"params": params}}
    grail = {"type": "OnnxGrail", "ratio": 0.5, "data_config": data}
    done = olive(folder, grail=grail, quantize={"type": "OnnxDynamicQuantization"})
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = (folder / "out").rglob("*.onnx")
    graph = onnx.load(written).graph
    assert "DynamicQuantizeLinear" in {node.op_type for node in graph.node}
    widths = {size for weight in graph.initializer for size in weight.dims}
    dense = {size for weight in onnx.load(folder / "model.onnx").graph.initializer for size in weight.dims}
    assert max(widths) < max(dense)


def test_nothing_to_prune_is_a_failed_pass(folder: Path) -> None:
    grail = {"type": "OnnxGrail", "ratio": 0.5, "data": "calib.npz", "options": {"include": "nothing is called so"}}
    done = olive(folder, grail=grail)
    assert "is pruned due to failed or invalid config for pass 'grail'" in done.stdout + done.stderr
    assert "NothingToCompressError" in done.stdout + done.stderr
    assert list((folder / "out").rglob("*.onnx")) == []
