"""Small networks as ONNX models, the same networks in plain numpy, and inputs whose activations are correlated.

The numpy versions take all widths from the weights, so they run narrowed weights as well as the original ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

Arrays = dict[str, np.ndarray[Any, Any]]
OPSET, IR = 17, 8
HEAD = 8  # features of one attention head


def model_of(
    nodes: Iterable[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    arrays: Mapping[str, np.ndarray[Any, Any]],
) -> onnx.ModelProto:
    """A checked model of versions that ONNX Runtime reads."""
    constants = [numpy_helper.from_array(np.ascontiguousarray(a), n) for n, a in arrays.items()]
    graph = helper.make_graph(list(nodes), "net", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    onnx.checker.check_model(model)
    return model


def to_bytes(model: Any) -> bytes:
    """An onnx_ir model as a file would hold it."""
    import onnx_ir

    return bytes(onnx_ir.to_proto(model).SerializeToString())


def weights_of(model: onnx.ModelProto) -> Arrays:
    """Initializers by name."""
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def node(op: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    """A node named like its output; inputs are separated by blanks."""
    return helper.make_node(op, inputs.split(), [output], name=f"{output}_{op}", **attributes)


def info(name: str, dtype: Any, shape: Iterable[int | str]) -> onnx.ValueInfoProto:
    """A graph input or output."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), list(shape))


def dense(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """A weight that keeps the scale of its input."""
    return rng.standard_normal((rows, columns)) / np.sqrt(rows)


def correlated(rng: np.random.Generator, count: int, width: int) -> np.ndarray[Any, Any]:
    """Rows near a subspace of half the width, as real activations are."""
    hidden = rng.standard_normal((count, width // 2))
    return hidden @ dense(rng, width // 2, width) + 0.1 * rng.standard_normal((count, width))


def images(count: int = 40, seed: int = 2) -> Arrays:
    """Feed of `convnet`: neighboring pixels are alike."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((count, 3, 8, 8))
    smooth = sum(values[:, :, i : i + 6, j : j + 6] for i in range(3) for j in range(3)) / 3
    return {"x": np.ascontiguousarray(smooth, dtype=np.float32)}


def vectors(count: int = 100, width: int = 12, dtype: Any = np.float32, seed: int = 3) -> Arrays:
    """Feed of `mlp`."""
    return {"x": correlated(np.random.default_rng(seed), count, width).astype(dtype)}


# ------------------------------------------------------------------------------------------------------------ MLP


def mlp(widths: tuple[int, ...] = (12, 32, 24, 40, 10), dtype: Any = np.float32, seed: int = 0) -> onnx.ModelProto:
    """Dense layers with ReLU between them: Gemm with a transposed weight, and MatMul with Add, in turn."""
    rng, arrays, nodes = np.random.default_rng(seed), {}, []
    last = len(widths) - 2
    value = correlated(rng, 200, widths[0])
    for k, (rows, columns) in enumerate(itertools.pairwise(widths)):
        source, target = ("x" if k == 0 else f"h{k - 1}"), ("y" if k == last else f"z{k}")
        weight = dense(rng, rows, columns)
        bias = rng.uniform(0, 0.5, columns) - (value @ weight).mean(axis=0)  # centred, so that no ReLU is silent
        value = np.maximum(value @ weight + bias, 0)
        weight, arrays[f"b{k}"] = weight.astype(dtype), bias.astype(dtype)
        if k % 2 == 0:
            arrays[f"w{k}"] = weight.T
            nodes.append(node("Gemm", f"{source} w{k} b{k}", target, transB=1))
        else:
            arrays[f"w{k}"] = weight
            nodes += [node("MatMul", f"{source} w{k}", f"m{k}"), node("Add", f"m{k} b{k}", target)]
        if k != last:
            nodes.append(node("Relu", target, f"h{k}"))
    return model_of(nodes, [info("x", dtype, ("batch", widths[0]))], [info("y", dtype, ("batch", widths[-1]))], arrays)


def run_mlp(weights: Arrays, feed: Arrays) -> Arrays:
    """All activations of `mlp`."""
    found: Arrays = {}
    value, depth = feed["x"].astype(np.float64), sum(n.startswith("w") for n in weights)
    for k in range(depth):
        weight = weights[f"w{k}"].T if k % 2 == 0 else weights[f"w{k}"]
        value = value @ weight + weights[f"b{k}"]
        if k < depth - 1:
            value = found[f"h{k}"] = np.maximum(value, 0)
    found["y"] = value
    return found


# ---------------------------------------------------------------------------------------------------- convolutions


def convnet(seed: int = 0) -> onnx.ModelProto:
    """stem - residual branch of two convolutions - convolution - Flatten - Gemm, with ReLU; float32 as ORT wants it."""
    rng = np.random.default_rng(seed)
    shapes = {"stem": (8, 3, 3, 3), "a": (16, 8, 3, 3), "b": (8, 16, 1, 1), "c": (12, 8, 3, 3)}
    arrays = {n: rng.standard_normal(s) / np.sqrt(np.prod(s[1:])) for n, s in shapes.items()}
    arrays |= {f"{n}_bias": 0.3 + 0.1 * rng.standard_normal(s[0]) for n, s in shapes.items()}
    arrays |= {"head": dense(rng, 12 * 9, 5), "head_bias": 0.1 * rng.standard_normal(5)}
    same = {"pads": [1, 1, 1, 1]}
    nodes = [
        node("Conv", "x stem stem_bias", "s0", **same),
        node("Relu", "s0", "s"),
        node("Conv", "s a a_bias", "a0", **same),
        node("Relu", "a0", "ha"),
        node("Conv", "ha b b_bias", "hb"),
        node("Add", "s hb", "r0"),
        node("Relu", "r0", "r"),
        node("Conv", "r c c_bias", "c0", strides=[2, 2], **same),
        node("Relu", "c0", "hc"),
        node("Flatten", "hc", "flat"),
        node("Gemm", "flat head head_bias", "y"),
    ]
    return model_of(
        nodes,
        [info("x", np.float32, ("batch", 3, 6, 6))],
        [info("y", np.float32, ("batch", 5))],
        {n: a.astype(np.float32) for n, a in arrays.items()},
    )


def run_convnet(weights: Arrays, feed: Arrays) -> Arrays:
    """All activations of `convnet`."""
    stem = np.maximum(_conv(feed["x"].astype(np.float64), weights, "stem", pad=1), 0)
    inner = np.maximum(_conv(stem, weights, "a", pad=1), 0)
    joined = np.maximum(stem + _conv(inner, weights, "b"), 0)
    last = np.maximum(_conv(joined, weights, "c", pad=1, stride=2), 0)
    flat = last.reshape(len(last), -1)
    return {"ha": inner, "flat": flat, "y": flat @ weights["head"] + weights["head_bias"]}


def _conv(x: np.ndarray[Any, Any], weights: Arrays, name: str, pad: int = 0, stride: int = 1) -> np.ndarray[Any, Any]:
    kernel = weights[name]
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    patches = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
    return np.einsum("nchwij,ocij->nohw", patches, kernel) + weights[f"{name}_bias"][:, None, None]


# ---------------------------------------------------------------------------------------------------- transformer


def transformer(dtype: Any = np.float32, seed: int = 0, width: int = 32, hidden: int = 48) -> onnx.ModelProto:
    """Two pre-norm layers of attention and MLP, the second one gated; inputs `ids` and `attention_mask`."""
    rng, nodes = np.random.default_rng(seed), []
    arrays: Arrays = {"table": rng.standard_normal((40, width // 2)) @ dense(rng, width // 2, width)}
    nodes += [
        node("Gather", "table ids", "x0"),
        node("Cast", "attention_mask", "mask", to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype))),
        node("Sub", "one mask", "padded"),
        node("Mul", "padded low", "bias0"),
        node("Unsqueeze", "bias0 axes", "bias"),
    ]
    for k in range(2):
        for name, rows, columns in (("q", width, width), ("k", width, width), ("v", width, width), ("o", width, width)):
            arrays[f"{name}{k}"] = dense(rng, rows, columns)
        arrays |= {f"{n}{k}_bias": 0.1 * rng.standard_normal(width) for n in "qkvo"}
        arrays |= {f"{n}{k}": 1 + 0.2 * rng.standard_normal(width) for n in ("na", "nm")}
        arrays |= {f"{n}{k}_bias": 0.1 * rng.standard_normal(width) for n in ("na", "nm")}
        arrays |= {f"up{k}": dense(rng, width, hidden), f"down{k}": dense(rng, hidden, width)}
        arrays |= {f"up{k}_bias": 0.1 * rng.standard_normal(hidden), f"down{k}_bias": 0.1 * rng.standard_normal(width)}
        nodes += _attention(k) + (_plain_mlp(k) if k == 0 else _gated_mlp(k))
    arrays |= {"gate1": dense(rng, width, hidden), "head": dense(rng, width, 6)}
    nodes += [node("MatMul", "x2 head", "y")]
    constants: Arrays = {n: a.astype(dtype) for n, a in arrays.items()}
    constants |= {"one": np.ones(1, dtype), "low": np.full(1, -1e9, dtype), "scale": np.array(HEAD**-0.5, dtype)}
    constants |= {
        "axes": np.array([1, 2]),
        "split": np.array([0, 0, width // HEAD, HEAD]),
        "join": np.array([0, 0, -1]),
    }
    inputs = [info(n, np.int64, ("batch", "sequence")) for n in ("ids", "attention_mask")]
    return model_of(nodes, inputs, [info("y", dtype, ("batch", "sequence", 6))], constants)


def _attention(k: int) -> list[onnx.NodeProto]:
    nodes = [node("LayerNormalization", f"x{k} na{k} na{k}_bias", f"n{k}", epsilon=1e-5)]
    for name in "qkv":
        nodes += [
            node("MatMul", f"n{k} {name}{k}", f"{name}{k}_m"),
            node("Add", f"{name}{k}_m {name}{k}_bias", f"{name}{k}_b"),
            node("Reshape", f"{name}{k}_b split", f"{name}{k}_s"),
            node("Transpose", f"{name}{k}_s", f"{name}{k}_t", perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]),
        ]
    return [
        *nodes,
        node("MatMul", f"q{k}_t k{k}_t", f"s{k}_m"),
        node("Mul", f"s{k}_m scale", f"s{k}_c"),
        node("Add", f"s{k}_c bias", f"s{k}_b"),
        node("Softmax", f"s{k}_b", f"p{k}", axis=-1),
        node("MatMul", f"p{k} v{k}_t", f"a{k}_m"),
        node("Transpose", f"a{k}_m", f"a{k}_t", perm=[0, 2, 1, 3]),
        node("Reshape", f"a{k}_t join", f"a{k}"),
        node("MatMul", f"a{k} o{k}", f"o{k}_m"),
        node("Add", f"o{k}_m o{k}_bias", f"o{k}_b"),
        node("Add", f"x{k} o{k}_b", f"r{k}"),
        node("LayerNormalization", f"r{k} nm{k} nm{k}_bias", f"rn{k}", epsilon=1e-5),
    ]


def _plain_mlp(k: int) -> list[onnx.NodeProto]:
    return [
        node("MatMul", f"rn{k} up{k}", f"u{k}_m"),
        node("Add", f"u{k}_m up{k}_bias", f"u{k}"),
        node("Relu", f"u{k}", f"h{k}"),
        *_down(k),
    ]


def _gated_mlp(k: int) -> list[onnx.NodeProto]:
    return [
        node("MatMul", f"rn{k} gate{k}", f"g{k}"),
        node("Sigmoid", f"g{k}", f"g{k}_s"),
        node("Mul", f"g{k} g{k}_s", f"g{k}_a"),
        node("MatMul", f"rn{k} up{k}", f"u{k}_m"),
        node("Add", f"u{k}_m up{k}_bias", f"u{k}"),
        node("Mul", f"g{k}_a u{k}", f"h{k}"),
        *_down(k),
    ]


def _down(k: int) -> list[onnx.NodeProto]:
    return [
        node("MatMul", f"h{k} down{k}", f"d{k}_m"),
        node("Add", f"d{k}_m down{k}_bias", f"d{k}"),
        node("Add", f"r{k} d{k}", f"x{k + 1}"),
    ]


def run_transformer(weights: Arrays, feed: Arrays) -> Arrays:
    """All activations of `transformer` that a block is measured on."""
    found: Arrays = {}
    x = weights["table"].astype(np.float64)[feed["ids"]]
    batch, length, _ = x.shape
    bias = (1.0 - feed["attention_mask"])[:, None, None, :] * -1e9
    for k in range(2):
        n = _norm(x, weights, f"na{k}")
        q, key, v = (
            (n @ weights[f"{s}{k}"] + weights[f"{s}{k}_bias"]).reshape(batch, length, -1, HEAD).transpose(0, 2, 1, 3)
            for s in "qkv"
        )
        scores = q @ key.transpose(0, 1, 3, 2) * HEAD**-0.5 + bias
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        found[f"a{k}"] = (shares @ v).transpose(0, 2, 1, 3).reshape(batch, length, -1)
        x = x + found[f"a{k}"] @ weights[f"o{k}"] + weights[f"o{k}_bias"]
        n = _norm(x, weights, f"nm{k}")
        h = n @ weights[f"up{k}"] + weights[f"up{k}_bias"]
        if k == 0:
            h = np.maximum(h, 0)
        else:
            gate = n @ weights[f"gate{k}"]
            h = h * gate / (1 + np.exp(-gate))
        found[f"h{k}"] = h
        x = x + h @ weights[f"down{k}"] + weights[f"down{k}_bias"]
    return found | {"y": x @ weights["head"]}


def _norm(x: np.ndarray[Any, Any], weights: Arrays, name: str) -> np.ndarray[Any, Any]:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * weights[name] + weights[f"{name}_bias"]


def tokens(count: int = 24, length: int = 10, seed: int = 1, *, padded: bool = False) -> Arrays:
    """Feed of `transformer`; sequences of different lengths when padded."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, length + 1, count) if padded else np.full(count, length)
    mask = (np.arange(length) < lengths[:, None]).astype(np.int64)
    return {"ids": rng.integers(0, 40, (count, length)), "attention_mask": mask}
