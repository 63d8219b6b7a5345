"""Measure the growth of the cost of tracing, proving and rewriting with the depth of a network.

Chains of residual layers (Conv-BatchNormalization-Relu or a gated MLP after a norm) of 125 to 1000 layers are traced
and narrowed without compensation; the JSON has seconds per stage and milliseconds per node.  With linear growth the
milliseconds per node are constant.

    python bench/trace_scaling.py [--layers 125,250,500,1000] [--out bench/results/trace_scaling.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import onnxgrail

WIDTH = 16


def plain_chain(layers: int) -> onnx.ModelProto:
    """Return a chain of Conv, BatchNormalization and Relu, in which every width is a block."""
    body, weights = [], {}
    for i in range(layers):
        body += [
            f"k{i} = Conv<pads=[1,1,1,1]>(r{i}, w{i}, b{i})",
            f"n{i} = BatchNormalization(k{i}, s{i}, b{i}, b{i}, v{i})",
            f"r{i + 1} = Relu(n{i})",
        ]
        weights |= {f"w{i}": (WIDTH, WIDTH if i else 3, 3, 3), f"b{i}": (WIDTH,), f"s{i}": (WIDTH,), f"v{i}": None}
    body.append(f"g = GlobalAveragePool(r{layers})\nf = Flatten(g)\ny = Gemm(f, head)")
    return model("float[N,3,8,8] r0 => float[N,5] y", body, weights | {"head": (WIDTH, 5)})


def residual_chain(layers: int) -> onnx.ModelProto:
    """Return a chain of two convolutions with a residual connection: one stream overall, one block per layer."""
    body, weights = ["x0 = Conv(x, stem)"], {"stem": (WIDTH, 3, 1, 1)}
    for i in range(layers):
        body += [
            f"k{i} = Conv<pads=[1,1,1,1]>(x{i}, w{i}, b{i})",
            f"r{i} = Relu(k{i})",
            f"o{i} = Conv(r{i}, u{i})",
            f"x{i + 1} = Add(x{i}, o{i})",
        ]
        weights |= {f"w{i}": (WIDTH, WIDTH, 3, 3), f"b{i}": (WIDTH,), f"u{i}": (WIDTH, WIDTH, 1, 1)}
    body.append(f"g = GlobalAveragePool(x{layers})\nf = Flatten(g)\ny = Gemm(f, head)")
    return model("float[N,3,8,8] x => float[N,5] y", body, weights | {"head": (WIDTH, 5)})


def transformer_chain(layers: int) -> onnx.ModelProto:
    """Return a chain of gated MLPs with a norm and a residual connection, which the norm keeps at full width."""
    body, weights = [], {}
    for i in range(layers):
        body += [
            f"n{i} = LayerNormalization(x{i}, s{i})",
            f"g{i} = MatMul(n{i}, a{i})",
            f"h{i} = Sigmoid(g{i})",
            f"u{i} = MatMul(n{i}, b{i})",
            f"m{i} = Mul(h{i}, u{i})",
            f"o{i} = MatMul(m{i}, c{i})",
            f"x{i + 1} = Add(x{i}, o{i})",
        ]
        weights |= {f"s{i}": (WIDTH,), f"a{i}": (WIDTH, 64), f"b{i}": (WIDTH, 64), f"c{i}": (64, WIDTH)}
    body.append(f"y = MatMul(x{layers}, head)")
    return model(f"float[N,4,{WIDTH}] x0 => float[N,4,5] y", body, weights | {"head": (WIDTH, 5)})


CHAINS: dict[str, Callable[[int], onnx.ModelProto]] = {
    "plain": plain_chain,
    "residual": residual_chain,
    "transformer": transformer_chain,
}


def model(signature: str, body: list[str], weights: dict[str, Any]) -> onnx.ModelProto:
    """Return a model from node lines; a weight without a shape is a vector of ones."""
    inputs, outputs = signature.split("=>")
    head = '<ir_version: 10, opset_import: ["" : 20]>'
    text = f"{head}\nchain ({inputs}) => ({outputs}) {{\n" + "\n".join(body) + "\n}"
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in weights.items():
        array = np.ones(WIDTH) if shape is None else rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]) + 1)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return proto


def measure(proto: onnx.ModelProto, folder: Path) -> dict[str, Any]:
    """Measure the seconds of a run without compensation, by stage, and of an inspection."""
    path, target = folder / "m.onnx", folder / "o.onnx"
    onnx.save(proto, path)
    started = time.perf_counter()
    report = onnxgrail.compress(
        path, target, unit_ratio=0.5, compensate="none", selector="l2", check=False, force=True, samples=2
    ).report.data
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    onnxgrail.inspect(path)
    nodes = len(proto.graph.node)
    return {
        "nodes": nodes,
        "blocks": len(report["blocks"]),
        "seconds": round(seconds, 2),
        "ms_per_node": round(1000 * seconds / nodes, 3),
        "inspect_seconds": round(time.perf_counter() - started, 2),
        "stages": report["timing"],
    }


def main() -> None:
    """Print a row of JSON per chain and depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="125,250,500,1000")
    parser.add_argument("--chains", default=",".join(CHAINS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.chains.split(","):
            for layers in map(int, args.layers.split(",")):
                row = {"chain": name, "layers": layers} | measure(CHAINS[name](layers), Path(folder))
                print(json.dumps(row), flush=True)
                rows.append(row)
    if args.out:
        data = {"date": datetime.now(UTC).date().isoformat(), "machine": platform.processor() or platform.machine()}
        args.out.write_text(json.dumps(data | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
