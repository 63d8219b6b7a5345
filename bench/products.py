"""Measure the time of C += XᵀX and C += XᵀY in float32 with NumPy, SciPy's BLAS, and a graph in ONNX Runtime.

    python bench/products.py [--rounds N] [--threads 1 2] [--kernels default Haswell Sandybridge]

`library` is the code of onnxgrail: NumPy, in groups of columns.  `kernels` are those of OpenBLAS
(`OPENBLAS_CORETYPE`): `default` is the choice of OpenBLAS, an older name is its choice for an unknown processor.  Each
round starts a process for every setting, in which all implementations run in turn.  `ms` are medians of wall-clock time
over rounds, `cpu_ms` of processor time, which other work on the machine disturbs less; `of_best` is the time as a
multiple of the fastest implementation, in processor time for one thread and in wall-clock time for more, which is
unreliable on a busy machine: idle threads of OpenBLAS wait actively.  `others` is true if other Python threads run
during a product.  JSON on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np
import onnxruntime
import scipy
from onnx import TensorProto, helper
from scipy.linalg import blas
from threadpoolctl import threadpool_info

from onnxgrail.algebra.moments.triangles import add_squares
from onnxgrail.commands.demo import machine

SHAPES = ((2048, 768), (16384, 384), (4096, 3072), (512, 64))  # rows, features
COLUMNS = 256  # of Y
PANEL = 256  # rows of a triangle that the graph computes together
SHORT = 0.02  # seconds: faster products are repeated
TICK = 0.001

Array = np.ndarray[Any, np.dtype[np.float32]]
Way = Callable[[], object]


def session(graph: Any, threads: int) -> onnxruntime.InferenceSession:
    """Open a graph on the CPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def graph(nodes: list[Any], inputs: tuple[str, ...], outputs: list[str]) -> Any:
    """Return a graph of float32 tensors of open shapes."""
    ends = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in names] for names in (inputs, outputs)]
    return helper.make_graph(nodes, "product", *ends)


def triangle(width: int) -> Any:
    """Return the graph of the lower triangle of XᵀX, computed in groups of rows."""
    nodes, outputs = [helper.make_node("Constant", [], ["axis"], value_ints=[1])], []
    for first in range(0, width, PANEL):
        last = min(first + PANEL, width)
        for name, start in (("a", first), ("b", 0)):
            bounds = [f"{name}{first}.{word}" for word in ("from", "to")]
            ends = zip(bounds, (start, last), strict=True)
            nodes += [helper.make_node("Constant", [], [bound], value_ints=[value]) for bound, value in ends]
            nodes.append(helper.make_node("Slice", ["x", *bounds, "axis"], [f"{name}{first}"]))
        nodes.append(helper.make_node("Gemm", [f"a{first}", f"b{first}"], [f"y{first}"], transA=1))
        outputs.append(f"y{first}")
    return graph(nodes, ("x",), outputs)


def squares(x: Array, threads: int) -> dict[str, Way]:
    """Return the implementations of adding XᵀX to a matrix."""
    width = x.shape[1]
    gemm = helper.make_node("Gemm", ["x", "x", "c"], ["y"], transA=1)
    whole, parts = session(graph([gemm], ("x", "c"), ["y"]), threads), session(triangle(width), threads)
    total, fortran = np.zeros((width, width), np.float32), np.zeros((width, width), np.float32, order="F")

    def by_parts() -> None:
        for first, part in zip(range(0, width, PANEL), parts.run(None, {"x": x}), strict=True):
            total[first : first + len(part), : part.shape[1]] += part

    return {
        "library": lambda: add_squares(total, x),
        "numpy": lambda: np.add(total, x.T @ x, out=total),
        "scipy": lambda: blas.ssyrk(1.0, x.T, beta=1.0, c=fortran, overwrite_c=1),
        "onnxruntime": lambda: whole.run(None, {"x": x, "c": total}),
        "onnxruntime triangle": by_parts,
    }


def products(x: Array, y: Array, threads: int) -> dict[str, Way]:
    """Return the implementations of adding XᵀY to a matrix."""
    gemm = helper.make_node("Gemm", ["x", "y", "c"], ["z"], transA=1)
    run = session(graph([gemm], ("x", "y", "c"), ["z"]), threads)
    total = np.zeros((x.shape[1], y.shape[1]), np.float32)
    return {
        "numpy": lambda: np.add(total, x.T @ y, out=total),
        "scipy": lambda: blas.sgemm(1.0, y.T, x.T, beta=1.0, c=total.T, trans_b=1, overwrite_c=1),
        "onnxruntime": lambda: run.run(None, {"x": x, "y": y, "c": total}),
    }


def cases(threads: int) -> Iterator[tuple[str, dict[str, Way]]]:
    """Yield each product with its implementations."""
    rng = np.random.default_rng(0)
    for rows, width in SHAPES:
        x, y = (rng.standard_normal((rows, n), np.float32) for n in (width, COLUMNS))
        yield f"XᵀX {rows}x{width}", squares(x, threads)
        yield f"XᵀY {rows}x{width}, {COLUMNS}", products(x, y, threads)


def seconds(way: Way) -> tuple[float, float]:
    """Return the time of one product, in wall-clock and in processor time."""
    count, begun, busy = 0, time.perf_counter(), time.process_time()
    while count == 0 or time.perf_counter() - begun < SHORT:
        way()
        count += 1
    return (time.perf_counter() - begun) / count, (time.process_time() - busy) / count


def lets_others_go_on(way: Way) -> bool:
    """Return True if a thread that only counts runs during a product."""
    turns: list[float] = []
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(TICK):
            turns.append(time.perf_counter())

    other = threading.Thread(target=tick)
    other.start()
    begun = time.perf_counter()
    way()
    over = time.perf_counter()
    ended.set()
    other.join()
    return sum(begun < turn < over for turn in turns) > 5


def work(threads: int) -> None:
    """Measure every implementation once, and print the times."""
    times, others = {}, {}
    for case, ways in cases(threads):
        if "3072" not in case:  # a product that takes seconds needs no warm-up
            for way in ways.values():
                way()
        times[case] = {name: seconds(way) for name, way in ways.items()}
        if case.endswith("4096x3072"):
            others = {name: lets_others_go_on(way) for name, way in ways.items()}
    kernels = sorted({pool["architecture"] for pool in threadpool_info() if pool["internal_api"] == "openblas"})
    print(json.dumps({"times": times, "others": others, "architecture": kernels}))


def child(kernels: str, threads: int) -> Any:
    """Run `work` in a process with these settings."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    environment.pop("OPENBLAS_CORETYPE", None)
    if kernels != "default":
        environment["OPENBLAS_CORETYPE"] = kernels
    words = [sys.executable, __file__, "--work", str(threads)]
    return json.loads(subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout)


def summary(kernels: str, threads: int, runs: list[Any]) -> Iterator[dict[str, Any]]:
    """Return a row for every product, with medians over the runs of one setting."""
    for case, ways in runs[0]["times"].items():
        clock, cpu = (
            {way: 1000 * statistics.median(run["times"][case][way][which] for run in runs) for way in ways}
            for which in (0, 1)
        )
        judged = cpu if threads == 1 else clock
        yield {
            "kernels": kernels,
            "architecture": runs[0]["architecture"],
            "threads": threads,
            "product": case,
            "ms": {way: float(f"{value:.3g}") for way, value in clock.items()},
            "cpu_ms": {way: float(f"{value:.3g}") for way, value in cpu.items()},
            "of_best": {way: round(value / min(judged.values()), 2) for way, value in judged.items()},
        }


def main() -> None:
    """Print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kernels", nargs="+", default=["default", "Haswell", "Sandybridge"])
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work)
        return
    settings = [(kernels, threads) for kernels in given.kernels for threads in given.threads]
    found: dict[tuple[str, int], list[Any]] = {setting: [] for setting in settings}
    for number in range(given.rounds):
        for setting in settings:
            found[setting].append(child(*setting))
            print(f"round {number + 1}: {setting}", file=sys.stderr)
    rows = [row for setting, runs in found.items() for row in summary(*setting, runs)]
    everything = [run["others"] for runs in found.values() for run in runs]
    others = {way: all(run[way] for run in everything) for way in everything[0]}
    head = {"bench": "products", "date": datetime.now(UTC).date().isoformat(), "machine": machine()}
    versions = {module.__name__: module.__version__ for module in (np, scipy, onnxruntime)}
    print(json.dumps({**head, "rounds": given.rounds, "versions": versions, "others": others, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
