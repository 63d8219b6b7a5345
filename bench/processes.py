"""Compare one process with several, each with one thread: the same bytes, in less time.

    python -m bench.processes [--width 4096] [--hidden 4096] [--layers 4] [--samples 128] > bench/results/processes.json

A stack of residual MLPs with random weights is narrowed in an open loop, in a closed loop and with `--compensate best`.
There are two rows per channel, so that sums over rows and solves both matter.

The processes run on one machine that has fewer cores than there are processes, so seconds on the clock tell nothing.
Two numbers are given instead, for the whole command from the start of the interpreter on:

- `busiest`: the processor time of the process that worked most;
- `path`: the time that a machine with a core for each process would need. The processes compare their processor times
  whenever they exchange anything, and all go on with the largest: as if everyone waited for everyone each time.
  `calibrate` is the part of it in which blocks are measured and decided; the rest is starting, reading, proving and
  writing, of which every process or the first one does the whole.

All processes run on one core, in turn: on two, each would be slower, and one process alone would not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import onnx
from onnx import helper, numpy_helper

import onnxgrail
from onnxgrail.core import Array
from onnxgrail.machine.group.sums import NOWHERE, Group, Node
from onnxgrail.machine.steps.codec import Record
from onnxgrail.narrowing import decide

T = TypeVar("T")
TOKENS, BATCH = 64, 8
MODES: dict[str, dict[str, Any]] = {
    "open loop": {"compensate": "grail"},
    "closed loop": {"compensate": "grail", "closed_loop": True},
    "best": {"compensate": "best"},
}
COMMON = {"unit_ratio": 0.3, "blocks": ("mlp",), "held_out": 0, "check": False, "batch_size": BATCH, "force": True}
ONE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Clocked:
    """A group whose processes compare their processor times whenever they exchange anything.

    Attributes:
        path: seconds on the longest way through all processes so far.
    """

    def __init__(self, group: Group) -> None:
        self._group, self.path, self._last = group, 0.0, 0.0

    rank = property(lambda self: self._group.rank)
    size = property(lambda self: self._group.size)

    def now(self) -> float:
        """Return the seconds on the longest way, with the work of this process since the last exchange."""
        return self.path + time.process_time() - self._last

    def _after(self, found: T, count: int) -> T:
        mine = np.array([self.now()])
        times = self._group.exchange([mine], count)
        self.path, self._last = max(float(one[0][0]) for one in times), time.process_time()
        return found

    def collect(self, nodes: list[Node], owners: Sequence[int]) -> None:
        """Combine partial sums."""
        self._after(self._group.collect(nodes, owners), self.size)

    def exchange(
        self, arrays: Sequence[Array], count: int, places: Mapping[int, Sequence[Array]] = NOWHERE
    ) -> list[Sequence[Array]]:
        """Exchange arrays."""
        return self._after(self._group.exchange(arrays, count, places), count)

    def share(self, record: Record | None, source: int = 0) -> Record | None:
        """Share a record."""
        return self._after(self._group.share(record, source), self.size)

    def agree(self, text: str) -> bool:
        """Compare a text."""
        return self._after(self._group.agree(text), self.size)


def work(folder: Path, output: str, mode: str) -> None:
    """Compress in this process; the first one prints its figures."""
    with onnxgrail.join() as group:
        clocked, settle, begun = Clocked(group), decide.settle, []

        def timed(*arguments: Any) -> float:
            begun.append(clocked.now())
            seconds = settle(*arguments)
            begun.append(clocked.now())
            return seconds

        with patch.object(decide, "settle", timed):
            onnxgrail.compress(
                folder / "m.onnx", folder / output, data=folder / "x.npy", group=clocked, **COMMON, **MODES[mode]
            )
        if group.rank == 0:
            print(json.dumps({"path": clocked.now(), "calibrate": begun[1] - begun[0]}))


def stack(layers: int, width: int, hidden: int) -> onnx.ModelProto:
    """Return a stack of residual MLPs."""
    rng = np.random.default_rng(0)
    nodes, weights, value = [], [], "x"
    for k in range(layers):
        up = rng.standard_normal((width, hidden), np.float32) / np.float32(width**0.5)
        down = rng.standard_normal((hidden, width), np.float32) / np.float32(hidden**0.5)
        weights += [numpy_helper.from_array(up, f"up{k}"), numpy_helper.from_array(down, f"down{k}")]
        nodes += [
            helper.make_node("MatMul", [value, f"up{k}"], [f"a{k}"], name=f"up{k}"),
            helper.make_node("Relu", [f"a{k}"], [f"h{k}"], name=f"relu{k}"),
            helper.make_node("MatMul", [f"h{k}", f"down{k}"], [f"b{k}"], name=f"down{k}"),
            helper.make_node("Add", [value, f"b{k}"], [f"x{k}"], name=f"add{k}"),
        ]
        value = f"x{k}"
    ends = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n", TOKENS, width]) for n in ("x", value)]
    graph = helper.make_graph(nodes, "stack", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(folder: Path, mode: str, size: int) -> dict[str, Any]:
    """Run a command in `size` processes; return its figures and the digest of the file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, **ONE, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [
        sys.executable,
        "-m",
        "bench.processes",
        "--folder",
        str(folder),
        "--output",
        f"{size}.onnx",
        "--mode",
        mode,
    ]
    started = time.perf_counter()
    words += ["--mode", mode]
    outs = [subprocess.PIPE, *[None] * (size - 1)]
    running = [subprocess.Popen(words, env={**common, "RANK": str(rank)}, stdout=out) for rank, out in enumerate(outs)]
    assert running[0].stdout is not None
    told, busy = json.loads(running[0].stdout.read() or "{}"), []
    for process in running:
        _, status, used = os.wait4(process.pid, 0)
        assert status == 0, f"exit status {status}"
        busy.append(round(used.ru_utime + used.ru_stime, 2))
    digest = hashlib.sha256((folder / f"{size}.onnx").read_bytes()).hexdigest()
    clock = round(time.perf_counter() - started, 2)
    figures = {name: round(seconds, 2) for name, seconds in told.items()}
    return {**figures, "busiest": max(busy), "processors": busy, "clock": clock, "sha256": digest[:16]}


def summary(args: argparse.Namespace, found: dict[str, dict[int, dict[str, Any]]], load: list[float]) -> Any:
    """Return all figures, and the ratios to those of one process."""
    modes = {}
    for mode, runs in found.items():
        ratios = {
            str(size): {key: round(runs[1][key] / one[key], 2) for key in ("path", "calibrate", "busiest")}
            for size, one in runs.items()
            if size > 1
        }
        same = len({one["sha256"] for one in runs.values()}) == 1
        modes[mode] = {"same_bytes": same, "speedup": ratios, "runs": {str(size): one for size, one in runs.items()}}
    return {
        "model": {
            "layers": args.layers,
            "width": args.width,
            "hidden": args.hidden,
            "rows": args.samples * TOKENS,
        },
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "threads": 1},
        "load": [round(value, 2) for value in load],
        "modes": modes,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench as a script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.folder is not None:
        work(args.folder, args.output, args.mode)
        return 0
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found: dict[str, dict[int, dict[str, Any]]] = {}
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(stack(args.layers, args.width, args.hidden), folder / "m.onnx")
        rng = np.random.default_rng(1)
        np.save(folder / "x.npy", rng.standard_normal((args.samples, TOKENS, args.width), np.float32))
        for mode in args.modes:
            found[mode] = {}
            for size in args.sizes:
                found[mode][size] = run(folder, mode, size)
                load.append(os.getloadavg()[0])
                print(mode, size, found[mode][size], file=sys.stderr)
    print(json.dumps(summary(args, found, load), indent=1))
    return 0 if all(len({one["sha256"] for one in runs.values()}) == 1 for runs in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
