"""Compress a model of the shape of Llama-2-7B with random weights on a GPU, as in the GRAIL paper.

    python -m bench.gpu_llama --device cuda

128 sequences of 2048 tokens, 30 % of the MLP neurons and of the heads, closed loop.  Prints one JSON object: seconds
of every stage, the peak memory of the GPU during the command minus the memory in use before, the peak memory of the
host, and the numbers of the paper.  Several GPUs: `--device cuda:0,1` starts the command with torchrun.  The weights
are random, so there is no result on fidelity.  With other sizes and `--device cpu` it runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.large_model import TYPES, show, write

SIZES = {"depth": 32, "width": 4096, "hidden": 11008, "heads": 32, "words": 32000, "tokens": 2048}
# arXiv:2602.23795, one A100: seconds, and memory in MB in addition to the model.
PAPER = {"calibration_seconds": 58.1, "solve_seconds": 3.2, "calibration_mb": 1137, "solve_mb": 3367}
EVERY = 0.2  # seconds between two measurements of the memory


class Gpus(threading.Thread):
    """A thread that measures the memory of all GPUs of this machine; it measures nothing without nvidia-smi."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self.names, self.before = used("name"), used("memory.used")
        self.peak = list(self.before)

    def run(self) -> None:
        """Measure until `stop` is called."""
        while self.before and not self._over.wait(EVERY):
            self.peak = [max(pair, key=int) for pair in zip(self.peak, used("memory.used"), strict=True)]

    def stop(self) -> list[int]:
        """Stop, and return the peak memory of each GPU minus its memory before, in MB."""
        self._over.set()
        self.join()
        return [int(most) - int(first) for most, first in zip(self.peak, self.before, strict=True)]


def used(what: str) -> list[str]:
    """Return nvidia-smi's value of a property for every GPU."""
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


def command(options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the command that is measured."""
    count = options.device.count(",") + 1
    start = ["torch.distributed.run", "--nproc-per-node", str(count), "-m"] if count > 1 else []
    words = [
        "compress",
        str(folder / "llama.onnx"),
        str(folder / "small.onnx"),
        "--data",
        str(folder / "ids.npy"),
        "--held-out",
        "0",
    ]
    choices = {
        "held-out": 0,
        "unit-ratio": options.ratio,
        "blocks": "mlp,heads",
        "compensate": "grail",
        "batch-size": options.batch_size,
        "device": options.device,
        "cache-budget": options.cache_budget,
    }
    flags = ["--closed-loop", "--no-check", "--save-as-external-data", "--force", "--json", "--no-progress"]
    given = [word for name, value in choices.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", *start, "onnxgrail", *words, *given, *flags]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Create the model, compress it, and return the measurements."""
    sizes = {name: getattr(options, name) for name in SIZES}
    started = time.perf_counter()
    write(folder / "llama.onnx", dtype=options.dtype, **sizes)
    made = time.perf_counter() - started
    ids = np.random.default_rng(1).integers(0, options.words, (options.samples, options.tokens))
    np.save(folder / "ids.npy", ids)
    gpus = Gpus()
    gpus.start()
    started = time.perf_counter()
    done = subprocess.run(command(options, folder), stdout=subprocess.PIPE, text=True, check=False)
    seconds, peak = time.perf_counter() - started, gpus.stop()
    if done.returncode:
        raise SystemExit(f"the command ended with {done.returncode}")
    report = json.loads(done.stdout)
    return {
        **sizes,
        **{name: getattr(options, name) for name in ("dtype", "samples", "batch_size", "ratio", "device")},
        "gpus": gpus.names,
        "model_mb": round((folder / "llama.onnx.data").stat().st_size / 2**20),
        "made_seconds": made,
        "seconds": seconds,
        "timing": report["timing"],
        "gpu_peak_mb": peak,
        "host_peak_bytes": report["peak_rss_bytes"],
        "narrowed": sum(block["kept"] < block["units"] for block in report["blocks"]),
        "notes": report["notes"],
        "paper": PAPER,
    }


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=TYPES, default="fp16")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--ratio", type=float, default=0.3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cache-budget", default="16G", help="host memory for activations the GPU has no room for")
    parser.add_argument("--folder", type=Path, help="work there and keep the files")
    return parser.parse_args(words)


def main() -> None:
    """Print the measurement."""
    show(measure, parsed())


if __name__ == "__main__":
    main()
