"""Measure other tools: onnxsim on the same ONNX file and data, Torch-Pruning on the same kind of network.

Each runs in its own interpreter, because its versions may differ from those of the bench.  The interpreters are given
by `--onnxsim PYTHON` and `--torch-pruning PYTHON` (with torch and transformers); nothing is installed.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from bench.speed import clock
from bench.speed.cells import START, Cell

WORKER = Path(__file__).resolve().parents[1] / "fidelity" / "onnxsim_worker.py"
TORCH = """
import json, sys, time
import torch, torch_pruning as tp
from transformers import ResNetConfig, ResNetForImageClassification
torch.set_num_threads(int(sys.argv[1]))
model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).eval()
images = torch.randn(128, 3, 224, 224)
with torch.no_grad():
    model(images[:8])
    wall, cpu = time.perf_counter(), time.process_time()
    for start in range(0, 128, 8):
        model(images[start:start + 8])
    forward = time.perf_counter() - wall, time.process_time() - cpu
before = sum(p.numel() for p in model.parameters())
wall, cpu = time.perf_counter(), time.process_time()
last = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
pruner = tp.pruner.MagnitudePruner(
    model, images[:1], importance=tp.importance.MagnitudeImportance(p=2), pruning_ratio=0.3, ignored_layers=last
)
pruner.step()
spent = time.perf_counter() - wall, time.process_time() - cpu
after = sum(p.numel() for p in model.parameters())
print(json.dumps({"version": tp.__version__, "forward": forward[0], "forward_cpu": forward[1], "prune": spent[0],
                  "prune_cpu": spent[1], "kept": after / before}))
"""


def onnxsim(python: str, cell: Cell, folder: Path, threads: int) -> dict[str, Any]:
    """Measure structured Wanda pruning at 0.3 of the cell's model on its data."""
    model, data = cell.written(folder)
    version = subprocess.run(
        [python, "-c", "import onnxsim; print(onnxsim.__version__.strip('v'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    words = [python, str(WORKER), str(model), str(data), str(folder / "rival.onnx"), "wanda", "0.3", "none"]
    used = clock.command(words, threads)
    plain = clock.forward(model, data, threads, cell.batch)
    return {
        "name": f"onnxsim {version}, wanda: {cell.name}",
        "group": "rivals",
        "threads": threads,
        "forward": plain["seconds"],
        "forward_cpu": plain["cpu"],
        **used,
        "ratio": (used["seconds"] - START) / plain["seconds"],
        "cpu_ratio": (used["cpu"] - START) / plain["cpu"],
    }


def torch_pruning(python: str, threads: int) -> dict[str, Any]:
    """Measure magnitude pruning of a ResNet-50 in torch, without data or compensation, and its forward pass."""
    words = [python, "-c", TORCH, str(threads)]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    used = clock.command(words, threads)
    return {
        "name": f"Torch-Pruning {found['version']}, magnitude (no data): resnet50",
        "group": "rivals",
        "threads": threads,
        "kept": found["kept"],
        "forward": found["forward"],
        "forward_cpu": found["forward_cpu"],
        **used,
        "seconds": found["prune"],
        "ratio": found["prune"] / found["forward"],
        "cpu_ratio": found["prune_cpu"] / found["forward_cpu"],
    }
