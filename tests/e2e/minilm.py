"""A sentence encoder of two layers like those of all-MiniLM-L6-v2, written by hand with drawn weights, and sentences.

Post-norm layers of width 384, twelve heads of 32, MLPs of 1536 with the exact GELU; only the vocabulary is small.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from .nets import Arrays, dense, info, model_of, node

LAYERS, WIDTH, HEAD, HIDDEN, WORDS = 2, 384, 32, 1536, 500
FORMAT = np.float32


def minilm(seed: int = 0) -> onnx.ModelProto:
    """The model: `input_ids` and `attention_mask` to `last_hidden_state`."""
    rng = np.random.default_rng(seed)
    arrays: Arrays = {"table": rng.standard_normal((WORDS, 64)) @ dense(rng, 64, WIDTH)}
    nodes = [
        node("Gather", "table input_ids", "x0"),
        node("Cast", "attention_mask", "mask", to=onnx.TensorProto.FLOAT),
        node("Sub", "one mask", "padded"),
        node("Mul", "padded low", "bias0"),
        node("Unsqueeze", "bias0 axes", "bias"),
    ]
    for k in range(LAYERS):
        nodes += _layer(k)
        arrays |= _weights(rng, k)
    constants: Arrays = {n: a.astype(FORMAT) for n, a in arrays.items()}
    scalars = {"one": 1.0, "low": -1e9, "half": 0.5, "scale": HEAD**-0.5, "root": 2**-0.5}
    constants |= {n: np.array(value, FORMAT) for n, value in scalars.items()}
    constants |= {"axes": np.array([1, 2]), "split": np.array([0, 0, -1, HEAD]), "join": np.array([0, 0, -1])}
    inputs = [info(n, np.int64, ("batch", "sequence")) for n in ("input_ids", "attention_mask")]
    output = info("last_hidden_state", FORMAT, ("batch", "sequence", WIDTH))
    nodes.append(node("Identity", f"x{LAYERS}", "last_hidden_state"))
    return model_of(nodes, inputs, [output], constants)


def _weights(rng: np.random.Generator, k: int) -> Arrays:
    shapes = {f"{n}.{k}": (WIDTH, WIDTH) for n in "qkvo"} | {f"up.{k}": (WIDTH, HIDDEN), f"down.{k}": (HIDDEN, WIDTH)}
    found: Arrays = {n: dense(rng, *shape) for n, shape in shapes.items()}
    found |= {f"{n}.bias": 0.1 * rng.standard_normal(shape[1]) for n, shape in shapes.items()}
    for n in (f"na.{k}", f"nm.{k}"):
        found |= {n: 1 + 0.2 * rng.standard_normal(WIDTH), f"{n}.bias": 0.1 * rng.standard_normal(WIDTH)}
    return found


def _layer(k: int) -> list[onnx.NodeProto]:
    nodes: list[onnx.NodeProto] = []

    def add(op: str, inputs: str, output: str, **attributes: Any) -> None:
        nodes.append(node(op, inputs, f"{output}.{k}", **attributes))

    def linear(source: str, weight: str, output: str) -> None:
        add("MatMul", f"{source} {weight}.{k}", f"{output}_m")
        add("Add", f"{output}_m.{k} {weight}.{k}.bias", output)

    for n, turned in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        linear(f"x{k}", n, f"{n}_b")
        add("Reshape", f"{n}_b.{k} split", f"{n}_s")
        add("Transpose", f"{n}_s.{k}", f"{n}_t", perm=turned)
    add("MatMul", f"q_t.{k} k_t.{k}", "scores")
    add("Mul", f"scores.{k} scale", "scaled")
    add("Add", f"scaled.{k} bias", "masked")
    add("Softmax", f"masked.{k}", "shares", axis=-1)
    add("MatMul", f"shares.{k} v_t.{k}", "mixed")
    add("Transpose", f"mixed.{k}", "turned", perm=[0, 2, 1, 3])
    add("Reshape", f"turned.{k} join", "merged")
    linear(f"merged.{k}", "o", "attended")
    add("Add", f"x{k} attended.{k}", "between")
    add("LayerNormalization", f"between.{k} na.{k} na.{k}.bias", "middle", epsilon=1e-12)
    linear(f"middle.{k}", "up", "wide")
    add("Mul", f"wide.{k} root", "rooted")
    add("Erf", f"rooted.{k}", "erf")
    add("Add", f"erf.{k} one", "raised")
    add("Mul", f"wide.{k} raised.{k}", "doubled")
    add("Mul", f"doubled.{k} half", "gelu")
    linear(f"gelu.{k}", "down", "narrow")
    add("Add", f"middle.{k} narrow.{k}", "sum")
    nodes.append(node("LayerNormalization", f"sum.{k} nm.{k} nm.{k}.bias", f"x{k + 1}", epsilon=1e-12))
    return nodes


def sentences(count: int = 16, length: int = 16, seed: int = 1) -> Arrays:
    """Feed of `minilm`: sentences of different lengths, padded."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(length) < rng.integers(4, length + 1, count)[:, None]).astype(np.int64)
    return {"input_ids": rng.integers(1, WORDS, (count, length)) * mask, "attention_mask": mask}
