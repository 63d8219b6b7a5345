"""Compare one process with two processes, each with one thread: the same bytes, in less time.

    python bench/processes.py [--rounds 3] [--layers 8] [--samples 2048] > bench/results/processes.json

A stack of residual MLPs with random weights is narrowed in closed loop.  There are many rows for its width, so that the
forward passes and the second moments dominate.  Runs alternate; medians are given of the seconds of the whole command
(including the start, which takes longer with torch), of its `calibrate` stage, and of the processor time of the busiest
process, which is the time that an idle machine would need.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

WIDTH, HIDDEN, TOKENS = 512, 1024, 64


def stack(layers: int) -> onnx.ModelProto:
    """Return a stack of residual MLPs."""
    rng = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for k in range(layers):
        up = rng.standard_normal((WIDTH, HIDDEN), np.float32) / np.float32(WIDTH**0.5)
        down = rng.standard_normal((HIDDEN, WIDTH), np.float32) / np.float32(HIDDEN**0.5)
        weights += [numpy_helper.from_array(up, f"up{k}"), numpy_helper.from_array(down, f"down{k}")]
        nodes += [
            helper.make_node("MatMul", [value, f"up{k}"], [f"a{k}"], name=f"up{k}"),
            helper.make_node("Relu", [f"a{k}"], [f"h{k}"], name=f"relu{k}"),
            helper.make_node("MatMul", [f"h{k}", f"down{k}"], [f"b{k}"], name=f"down{k}"),
            helper.make_node("Add", [value, f"b{k}"], [f"x{k}"], name=f"add{k}"),
        ]
        value = f"x{k}"
    ends = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n", TOKENS, WIDTH]) for n in ("x", value)]
    graph = helper.make_graph(nodes, "stack", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(folder: Path, size: int) -> dict[str, float]:
    """Run a command in `size` processes; return seconds, seconds of calibration, processor seconds of the busiest."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [
        "m.onnx",
        f"{size}.onnx",
        "--data",
        "x.npy",
        "--held-out",
        "0",
        "--no-check",
        "--force",
        "--ratio",
        "0.3",
        "--blocks",
        "mlp",
        "--json",
        "-q",
    ]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    common |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started, busy = time.perf_counter(), []
    with (folder / "report.json").open("wb") as report:
        pids = [
            subprocess.Popen(
                [sys.executable, "-m", "onnxgrail", "compress", *words],
                cwd=folder,
                env={**common, "RANK": str(rank)},
                stdout=report if rank == 0 else subprocess.DEVNULL,
            ).pid
            for rank in range(size)
        ]
        for pid in pids:
            _, status, used = os.wait4(pid, 0)
            assert status == 0, f"exit status {status}"
            busy.append(used.ru_utime + used.ru_stime)
    seconds = time.perf_counter() - started
    timing = json.loads((folder / "report.json").read_text())["timing"]
    return {"command": seconds, "calibrate": timing["calibrate"], "processor": max(busy)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench as a script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2048)
    args = parser.parse_args(arguments)
    found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(stack(args.layers), folder / "m.onnx")
        rng = np.random.default_rng(1)
        np.save(folder / "x.npy", rng.standard_normal((args.samples, TOKENS, WIDTH), np.float32))
        for _ in range(args.rounds):
            for size, rows in found.items():
                rows.append(run(folder, size))
                load.append(os.getloadavg()[0])
        same = (folder / "1.onnx").read_bytes() == (folder / "2.onnx").read_bytes()
    print(json.dumps(summary(args, found, load, same=same), indent=1))
    return 0 if same else 1


def summary(
    args: argparse.Namespace, found: dict[int, list[dict[str, float]]], load: list[float], *, same: bool
) -> Any:
    """Return the medians and their ratios."""
    medians = {
        size: {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
        for size, rows in found.items()
    }
    return {
        "model": {"layers": args.layers, "width": WIDTH, "hidden": HIDDEN, "rows": args.samples * TOKENS},
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load": [round(value, 2) for value in load],
        "same_bytes": same,
        "one_process": medians[1],
        "two_processes": medians[2],
        "speedup": {key: round(medians[1][key] / medians[2][key], 2) for key in medians[1]},
        "runs": {str(size): [{k: round(v, 2) for k, v in row.items()} for row in rows] for size, rows in found.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
