"""Compress a language model of any size with random weights in a separate process, and measure its memory.

    python -m bench.large_model --size 8G --dtype fp16 --compensate grail
    python -m bench.large_model --size 8G --unit-ratio 0 --quantize int4

The model has the shape of Llama (RMSNorm, rotary positions, causal attention, gated MLP), and its weights are in
external data, written layer by layer.  Prints one JSON object: seconds, and the peak anonymous and total resident
memory of the process that compresses.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxgrail.core import Recipe
from onnxgrail.machine.amounts import cache_bytes

TYPES = {
    "fp16": (TensorProto.FLOAT16, np.dtype(np.float16)),
    "bf16": (TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
    "fp32": (TensorProto.FLOAT, np.dtype(np.float32)),
}
PIECE = 2**22  # random numbers that are generated at once

RUN = """
import json, sys, time
from collections import Counter
import numpy as np
import onnxgrail
model, target, ids, choices = json.loads(sys.argv[1])
ids = np.array(ids, dtype=np.int64)
started = time.perf_counter()
if target is None:
    found = onnxgrail.inspect(model, input_shapes={"ids": ids.shape})
    print(json.dumps({"blocks": len(found.blocks), "seconds": time.perf_counter() - started}))
else:
    data = onnxgrail.compress(model, target, data={"ids": ids}, held_out=0, force=True, **choices).report.data
    quantized = data["quantization"]
    few = {} if quantized is None else {
        "rounding": Counter(m["rounding"] for m in quantized["matrices"]),
        "cosine_quantized": [o["cosine"] for o in quantized["outputs"]],
        "notes": quantized["notes"],
    }
    print(json.dumps({
        "seconds": time.perf_counter() - started,
        "timing": data["timing"],
        "bytes_before": data["model"]["bytes_before"],
        "bytes_after": data["model"]["bytes_after"],
        "checker": data["verification"]["checker"],
        "cosine": [o["cosine"] for o in data["verification"]["outputs"]],
        "narrowed": sum(b["kept"] < b["units"] for b in data["blocks"]),
        "refusals": len(data["refusals"]),
        **few,
    }))
"""

LOAD = """
import json, sys
import numpy as np
from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.graph.io.model_file import load
from onnxgrail.graph.io.serial import to_bytes
path, ids, dtype = sys.argv[1:]
model = to_bytes(load(path)) if dtype == "bf16" else path  # there are no kernels for bfloat16
with open_session(model, Setup.as_is()) as session:
    logits = session.run({"ids": np.array(json.loads(ids), dtype=np.int64)})["logits"]
print(json.dumps({"shape": logits.shape, "finite": bool(np.isfinite(logits).all())}))
"""


class Weights:
    """A writer of a model's external data."""

    def __init__(self, file: BinaryIO, name: str, dtype: str, seed: int) -> None:
        self._file, self._name, self._rng = file, name, np.random.default_rng(seed)
        self.kind, self.dtype = TYPES[dtype]
        self.tensors: list[onnx.TensorProto] = []

    def matrix(self, name: str, rows: int, columns: int, scale: float) -> str:
        """Write Gaussian random numbers in pieces, and return the name."""
        start = self._begin(name, [rows, columns])
        left = rows * columns
        while left:
            count = min(left, PIECE)
            piece = self._rng.standard_normal(count, dtype=np.float32) * np.float32(scale)
            self._file.write(piece.astype(self.dtype).view(np.uint8).data)
            left -= count
        return self._end(name, start)

    def table(self, name: str, array: np.ndarray) -> str:
        """Write given numbers, and return the name."""
        start = self._begin(name, list(array.shape))
        self._file.write(np.ascontiguousarray(array, np.float32).astype(self.dtype).tobytes())
        return self._end(name, start)

    def _begin(self, name: str, shape: list[int]) -> int:
        self._file.write(b"\0" * (-self._file.tell() % 64))
        self.tensors.append(TensorProto(name=name, dims=shape, data_type=self.kind, data_location=TensorProto.EXTERNAL))
        return self._file.tell()

    def _end(self, name: str, start: int) -> str:
        for key, value in (("location", self._name), ("offset", start), ("length", self._file.tell() - start)):
            self.tensors[-1].external_data.add(key=key, value=str(value))
        return name


class Graph:
    """A graph under construction: nodes in order, each named after its output."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.nodes, self.small = weights, [], []

    def node(self, op: str, *inputs: str, to: str, **attributes: Any) -> str:
        """Add a node with one output."""
        self.nodes.append(helper.make_node(op, list(inputs), [to], name=to, **attributes))
        return to

    def ints(self, name: str, *values: int) -> str:
        """Add a constant of integers."""
        self.small.append(onnx.numpy_helper.from_array(np.array(values, dtype=np.int64), name))
        return name


def write(path: Path, *, depth: int, width: int, hidden: int, heads: int, words: int, tokens: int, dtype: str) -> None:
    """Write the model and its data file."""
    with path.with_name(f"{path.name}.data").open("wb") as file:
        weights = Weights(file, f"{path.name}.data", dtype, seed=0)
        graph = Graph(weights)
        size = width // heads
        angles = np.outer(np.arange(tokens), 10000.0 ** (-np.arange(0, size, 2) / size))
        angles = np.concatenate([angles, angles], axis=1)[None, None]
        weights.table("cos", np.cos(angles))
        weights.table("sin", np.sin(angles))
        weights.table("mask", np.triu(np.full((tokens, tokens), -1e4), 1))
        weights.table("two", np.array(2.0))
        weights.table("tiny", np.array(1e-5))
        weights.table("root", np.array(size**0.5))
        graph.ints("last", -1)
        graph.ints("split", 0, 0, heads, size)
        graph.ints("joined", 0, 0, -1)
        graph.ints("halves", size // 2, size // 2)
        x = graph.node("Gather", weights.matrix("embedding", words, width, 1.0), "ids", to="embedded")
        for layer in range(depth):
            x = attention(graph, f"layer{layer}", x, width)
            x = mlp(graph, f"layer{layer}", x, width, hidden)
        x = norm(graph, "final", x, width)
        graph.node("MatMul", x, weights.matrix("head", width, words, width**-0.5), to="logits")
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", tokens])
    logits = helper.make_tensor_value_info("logits", weights.kind, ["N", tokens, words])
    whole = helper.make_graph(graph.nodes, "llama", [ids], [logits], [*weights.tensors, *graph.small])
    model = helper.make_model(whole, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path.write_bytes(model.SerializeToString())


def norm(graph: Graph, name: str, x: str, width: int) -> str:
    """Add an RMSNorm as exporters decompose it."""
    square = graph.node("Pow", x, "two", to=f"{name}/square")
    mean = graph.node("ReduceMean", square, "last", to=f"{name}/mean", keepdims=1)
    root = graph.node("Sqrt", graph.node("Add", mean, "tiny", to=f"{name}/safe"), to=f"{name}/root")
    scaled = graph.node("Div", x, root, to=f"{name}/scaled")
    return graph.node("Mul", scaled, graph.weights.table(f"{name}/gain", np.ones(width)), to=f"{name}/normed")


def attention(graph: Graph, layer: str, x: str, width: int) -> str:
    """Add causal self-attention with rotary positions."""
    source = norm(graph, f"{layer}/before", x, width)
    parts = {}
    for part in "qkv":
        weight = graph.weights.matrix(f"{layer}/{part}/weight", width, width, width**-0.5)
        flat = graph.node("MatMul", source, weight, to=f"{layer}/{part}")
        split = graph.node("Reshape", flat, "split", to=f"{layer}/{part}/split")
        parts[part] = graph.node("Transpose", split, to=f"{layer}/{part}/heads", perm=[0, 2, 1, 3])
    q, k = (rotated(graph, f"{layer}/{part}", parts[part]) for part in "qk")
    turned = graph.node("Transpose", k, to=f"{layer}/turned", perm=[0, 1, 3, 2])
    scores = graph.node("Div", graph.node("MatMul", q, turned, to=f"{layer}/scores"), "root", to=f"{layer}/scaled")
    shares = graph.node("Softmax", graph.node("Add", scores, "mask", to=f"{layer}/causal"), to=f"{layer}/shares")
    mixed = graph.node("MatMul", shares, parts["v"], to=f"{layer}/mixed")
    back = graph.node("Transpose", mixed, to=f"{layer}/back", perm=[0, 2, 1, 3])
    joined = graph.node("Reshape", back, "joined", to=f"{layer}/joined")
    weight = graph.weights.matrix(f"{layer}/o/weight", width, width, 0.5 * width**-0.5)
    return graph.node("Add", x, graph.node("MatMul", joined, weight, to=f"{layer}/o"), to=f"{layer}/attended")


def rotated(graph: Graph, name: str, x: str) -> str:
    """Add rotary positions on (N, heads, T, size)."""
    halves = [f"{name}/low", f"{name}/high"]
    graph.nodes.append(helper.make_node("Split", [x, "halves"], halves, name=f"{name}/halved", axis=3))
    minus = graph.node("Neg", halves[1], to=f"{name}/minus")
    turned = graph.node("Concat", minus, halves[0], to=f"{name}/rolled", axis=3)
    straight = graph.node("Mul", x, "cos", to=f"{name}/straight")
    return graph.node("Add", straight, graph.node("Mul", turned, "sin", to=f"{name}/across"), to=f"{name}/rotated")


def mlp(graph: Graph, layer: str, x: str, width: int, hidden: int) -> str:
    """Add the gated MLP."""
    source = norm(graph, f"{layer}/between", x, width)
    gate, up = (
        graph.node(
            "MatMul", source, graph.weights.matrix(f"{layer}/{n}/weight", width, hidden, width**-0.5), to=f"{layer}/{n}"
        )
        for n in ("gate", "up")
    )
    slope = graph.node("Sigmoid", gate, to=f"{layer}/slope")
    inner = graph.node("Mul", graph.node("Mul", gate, slope, to=f"{layer}/silu"), up, to=f"{layer}/inner")
    weight = graph.weights.matrix(f"{layer}/down/weight", hidden, width, 0.5 * hidden**-0.5)
    return graph.node("Add", x, graph.node("MatMul", inner, weight, to=f"{layer}/down"), to=f"{layer}/out")


def watched(code: str, *words: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Run a Python process; return its output and its peak resident memory in bytes: anonymous, file and total."""
    peak = {"RssAnon": 0, "RssFile": 0, "VmRSS": 0}
    with subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            for line in status.read_text().splitlines():
                name, _, value = line.partition(":")
                if name in peak:
                    peak[name] = max(peak[name], int(value.split()[0]) * 1024)
            time.sleep(0.01)
        assert process.stdout is not None
        text = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}")
    return json.loads(text), peak


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Create the model, compress it, and load the result."""
    item = TYPES[options.dtype][1].itemsize
    per_layer = 4 * options.width**2 + 3 * options.width * options.hidden
    ends = 2 * options.words * options.width
    wanted = cache_bytes(Recipe(cache_budget=options.size))
    depth = max(1, round((wanted / item - ends) / per_layer))
    path, small = folder / "large.onnx", folder / "small.onnx"
    started = time.perf_counter()
    sizes = {name: getattr(options, name) for name in ("width", "hidden", "heads", "words", "tokens", "dtype")}
    write(path, depth=depth, **sizes)
    made = time.perf_counter() - started
    ids = np.random.default_rng(1).integers(0, options.words, (options.samples, options.tokens)).tolist()
    names = ("unit_ratio", "compensate", "selector", "quantize", "cache_budget", "batch_size", "save_as_external_data")
    choices = {name: getattr(options, name) for name in names}
    target = None if options.inspect else str(small)
    found, peak = watched(RUN, json.dumps([str(path), target, ids, choices]))
    result = {"depth": depth, **sizes, "samples": options.samples, "made_seconds": made, **found, "peak_bytes": peak}
    if options.inspect:
        return result
    loaded, loading = watched(LOAD, str(small), json.dumps(ids[:1]), options.dtype)
    return result | choices | {"loaded": loaded, "loaded_peak_bytes": loading}


def show(measure: Callable[[argparse.Namespace, Path], Any], options: argparse.Namespace) -> None:
    """Print the measurement, made in the chosen folder or in a temporary one."""
    with nullcontext(options.folder) if options.folder is not None else tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(options, Path(folder)), indent=1))


def main() -> None:
    """Print the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2.5G")
    parser.add_argument("--dtype", choices=TYPES, default="fp16")
    for name, default in {"width": 2048, "hidden": 5632, "heads": 16, "words": 32000, "tokens": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--unit-ratio", type=float, default=0.3)
    parser.add_argument("--compensate", default="grail")
    parser.add_argument("--selector", default="wanda")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--cache-budget", default="64M")
    parser.add_argument("--save-as-external-data", action="store_true", help="also below 2 GB")
    parser.add_argument("--inspect", action="store_true", help="look at the model instead of compressing it")
    parser.add_argument("--folder", type=Path, help="work there and keep the files")
    options = parser.parse_args()
    show(measure, options)


if __name__ == "__main__":
    main()
