"""Measure the growth of the memory of a layer-wise fit with the depth of a model; there should be none.

    python -m bench.refine_memory > bench/results/refine_memory.json

Models with random weights in external data, of equal width and of 12 and 24 layers: one of the shape of Llama, one
stack of residual MLPs.  Each is narrowed and fitted in a separate process, whose anonymous resident memory (RssAnon) is
measured; pages of mapped files are not counted, because the system frees them when needed.  Two epochs are enough:
later ones hold the same tensors.  `growth` is the peak of the deeper model divided by that of the other.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from bench import large_model
from bench.large_model import Graph, Weights, watched
from onnxgrail.commands.demo import machine

DEPTHS = (12, 24)
WIDTH, HIDDEN, HEADS, WORDS, TOKENS, SAMPLES = 512, 1536, 8, 2000, 32, 40
REFINES = ("none", "laco")
RUN = """
import json, sys, time
import numpy as np
import onnxgrail
from onnxgrail.methods.refine import laco
laco.EPOCHS, laco.STEPS = 2, 1
path, feed, refine = json.loads(sys.argv[1])
started = time.perf_counter()
with np.load(feed) as file:
    data = dict(file)
found = onnxgrail.compress(
    path, path + ".small", data=data, held_out=0, unit_ratio=0.5, blocks=("mlp",), compensate="none", selector="l2",
    refine=refine,     save_as_external_data=True, force=True, check=False,
)
rows = found.report.data["refines"]
fits = [row for row in rows if row["epochs"]]
print(json.dumps({"seconds": time.perf_counter() - started, "fitted": len(fits)}))
"""


def llama(path: Path, depth: int) -> dict[str, Any]:
    """Write a decoder; return its data."""
    sizes: dict[str, Any] = {"width": WIDTH, "hidden": HIDDEN, "heads": HEADS, "words": WORDS, "tokens": TOKENS}
    large_model.write(path, depth=depth, dtype="fp32", **sizes)
    return {"ids": np.random.default_rng(1).integers(0, WORDS, (SAMPLES, TOKENS))}


def mlps(path: Path, depth: int) -> dict[str, Any]:
    """Write a stack of residual MLPs, each after a normalization; return its data."""
    with path.with_name(f"{path.name}.data").open("wb") as file:
        weights = Weights(file, f"{path.name}.data", "fp32", seed=0)
        graph = Graph(weights)
        weights.table("two", np.array(2.0))
        weights.table("tiny", np.array(1e-5))
        graph.ints("last", -1)
        x = "x"
        for layer in range(depth):
            x = large_model.mlp(graph, f"layer{layer}", x, WIDTH, HIDDEN)
        large_model.norm(graph, "final", x, WIDTH)
    ends = [onnx.helper.make_tensor_value_info(n, weights.kind, ["N", TOKENS, WIDTH]) for n in ("x", "final/normed")]
    whole = onnx.helper.make_graph(graph.nodes, "mlps", ends[:1], ends[1:], [*weights.tensors, *graph.small])
    opset = [onnx.helper.make_opsetid("", 18)]
    path.write_bytes(onnx.helper.make_model(whole, opset_imports=opset, ir_version=9).SerializeToString())
    return {"x": np.random.default_rng(1).standard_normal((SAMPLES, TOKENS, WIDTH), dtype=np.float32)}


SHAPES: dict[str, Callable[[Path, int], dict[str, Any]]] = {"llama": llama, "mlps": mlps}


def row(shape: str, depth: int, refine: str, folder: Path) -> dict[str, Any]:
    """Narrow a model by half, refine it, and return the measurement."""
    path, feed = folder / f"{shape}{depth}.onnx", folder / f"{shape}.npz"
    if not path.exists():
        np.savez(feed, **SHAPES[shape](path, depth))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found, peak = watched(RUN, json.dumps([str(path), str(feed), refine]))
    weights = path.with_name(f"{path.name}.data").stat().st_size
    return {
        "shape": shape,
        "depth": depth,
        "refine": refine,
        "weight_bytes": weights,
        "peak_anonymous_bytes": peak["RssAnon"],
        **found,
    }


def growth(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the peaks of the deeper models divided by those of the others."""
    peaks = {(r["shape"], r["refine"], r["depth"]): r["peak_anonymous_bytes"] for r in rows}
    pairs = dict.fromkeys((shape, refine) for shape, refine, _ in peaks)
    low, high = DEPTHS
    return [{"shape": s, "refine": r, "growth": peaks[s, r, high] / peaks[s, r, low]} for s, r in pairs]


def main() -> None:
    """Print the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=tuple(SHAPES), choices=tuple(SHAPES))
    parser.add_argument("--refines", nargs="+", default=REFINES)
    args = parser.parse_args()
    started, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            for depth in DEPTHS:
                for refine in args.refines:
                    rows.append(row(shape, depth, refine, Path(folder)))
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    sizes = {"width": WIDTH, "hidden": HIDDEN, "tokens": TOKENS, "samples": SAMPLES}
    spent = time.perf_counter() - started
    head = {"bench": "refine_memory", "date": dt.datetime.now(dt.UTC).date().isoformat(), "machine": machine()}
    print(json.dumps({**head, "threads": 1, "seconds": spent, **sizes, "growth": growth(rows), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
