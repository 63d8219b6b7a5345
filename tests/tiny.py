"""Tiny models as ONNX text with seeded weights: one per thing a graph can do to its channels.

Shapes of all intermediates are recorded (as exporters do), so that every use of these models also notices stale ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.core import Array

Weights = Mapping[str, tuple[int, ...] | Array]

SIZES = {"N": 3, "S": 5, "T": 4, "P": 2}
VOCABULARY = 7


def tiny(
    signature: str,
    body: str,
    weights: Weights,
    *,
    opset: int = 20,
    imports: Mapping[str, int] | None = None,
    ir_version: int = 10,
    recorded: bool = True,
    functions: str = "",
    seed: int = 0,
) -> ir.Model:
    """A model from text.

    Args:
        signature: `float[N,6] x => float[] y`, in the words of ONNX text.
        body: the nodes; names of weights are used freely.
        weights: arrays, or shapes of arrays that are drawn.
        opset: version of the standard operators; imports: versions of other domains.
        ir_version: of the file.
        recorded: write inferred shapes into the file, for intermediates too.
        functions: text of local functions, as stand-ins for ops that the CPU has no kernel of.
        seed: of the drawn weights.
    """
    domains = ", ".join(f'"{d}" : {v}' for d, v in {"": opset, **(imports or {})}.items())
    inputs, outputs = signature.split("=>")
    text = f"<ir_version: {ir_version}, opset_import: [{domains}]>\ntiny ({inputs}) => ({outputs}) {{\n{body}\n}}"
    proto = onnx.parser.parse_model(f"{text}\n{functions}")
    rng = np.random.default_rng(seed)
    for name, weight in weights.items():
        array = drawn(rng, weight) if isinstance(weight, tuple) else weight
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    if ir_version < 4:
        proto.graph.input.extend(_declared(t) for t in proto.graph.initializer)
    for number, node in enumerate(proto.graph.node):
        node.name = node.name or f"{node.op_type}_{number}"
    if recorded:
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    return ir.from_proto(proto)


def drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Weights that keep activations near unit size."""
    fan = max(1, int(np.prod(shape)) // max(shape, default=1))
    return (rng.normal(size=shape) / np.sqrt(fan)).astype(np.float32)


def ints(*values: int) -> Array:
    """A shape or index constant."""
    return np.array(values, dtype=np.int64)


def scalar(value: float) -> Array:
    """A constant without axes."""
    return np.array(value, dtype=np.float32)


def _declared(tensor: onnx.TensorProto) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))


def feed(model: ir.Model, seed: int = 1, **sizes: int) -> dict[str, Array]:
    """Inputs that fit: Gaussian floats, ids below the vocabulary, mixed booleans; symbolic sizes as in `SIZES`."""
    rng = np.random.default_rng(seed)
    named = {**SIZES, **sizes}
    found = {}
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue
        assert value.shape is not None
        assert value.dtype is not None
        shape = tuple(d if isinstance(d, int) else named[str(d.value)] for d in value.shape.dims)
        kind = value.dtype.numpy()
        if kind.kind == "f":
            found[value.name] = rng.normal(size=shape).astype(kind)
        elif kind.kind == "b":
            found[value.name] = rng.random(shape) < 0.7
        else:
            found[value.name] = rng.integers(0, VOCABULARY, shape).astype(kind)
    return found


def lines(text: str, **names: object) -> str:
    """Node text with `$name` filled in, for layers that repeat."""
    known = "|".join(sorted(names, key=len, reverse=True))
    return re.sub(rf"\$({known})", lambda m: str(names[m[1]]), text)


def shuffled(channels: int, groups: int, end: str) -> ir.Model:
    """Two grouped convolutions of `h`, each followed by a shuffle, as in ShuffleNet of 2017; `end` makes z of s1."""
    layer = f"""g$i = Conv<group={groups}>($x, k$i)
        r$i = Reshape(g$i, apart)
        t$i = Transpose<perm=[0,2,1,3,4]>(r$i)
        s$i = Reshape(t$i, back)
        """
    return tiny(
        "float[N,3,4,4] x => float[] y",
        f"h = Conv(x, w0)\n{lines(layer, i=0, x='h')}{lines(layer, i=1, x='s0')}{end}\ny = Conv(z, w1)",
        {
            "w0": (channels, 3, 1, 1),
            "k0": (channels, channels // groups, 1, 1),
            "k1": (channels, channels // groups, 1, 1),
            "apart": ints(-1, groups, channels // groups, 4, 4),
            "back": ints(-1, channels, 4, 4),
            "w1": (5, channels, 1, 1),
        },
    )


def mlp(depth: int = 3, width: int = 8, *, features: int = 6) -> ir.Model:
    """Residual layers of two matrices each: every hidden width is a block, the stream is one more."""
    layer = """
        n$i = MatMul(x$i, a$i)
        m$i = Add(n$i, b$i)
        r$i = Relu(m$i)
        o$i = MatMul(r$i, c$i)
        x$j = Add(x$i, o$i)"""
    body = "x0 = MatMul(x, stem)" + "".join(lines(layer, i=i, j=i + 1) for i in range(depth))
    weights: dict[str, tuple[int, ...]] = {"stem": (5, features), "head": (features, 4)}
    for i in range(depth):
        weights |= {f"a{i}": (features, width), f"b{i}": (width,), f"c{i}": (width, features)}
    return tiny("float[N,5] x => float[N,4] y", f"{body}\ny = MatMul(x{depth}, head)", weights)


def two_ends() -> ir.Model:
    """Two layers, of which the first makes an output `z` that nothing after it reads."""
    text = """
        h = MatMul(x, e)
        a = MatMul(h, w)
        b = Relu(a)
        z = MatMul(b, v)
        c = MatMul(h, p)
        d = Relu(c)
        g = MatMul(d, q)
        k = Add(g, h)
        y = MatMul(k, o)
    """
    sizes = {"e": (5, 6), "w": (6, 16), "v": (16, 3), "p": (6, 16), "q": (16, 6), "o": (6, 4)}
    return tiny("float[N,5] x => float[N,4] y, float[N,3] z", text, sizes)


def cnn(widths: Sequence[int] = (8, 6), *, classes: int = 5) -> ir.Model:
    """Convolutions with batch norm and a pooled, flattened head: every width is a block."""
    body, weights, channels = [], {}, 3
    for i, width in enumerate(widths):
        source = "x" if i == 0 else f"r{i - 1}"
        body.append(f"k{i} = Conv<pads=[1,1,1,1]>({source}, w{i}, b{i})")
        body.append(f"n{i} = BatchNormalization(k{i}, s{i}, t{i}, u{i}, v{i})")
        body.append(f"r{i} = Relu(n{i})")
        weights |= {f"w{i}": (width, channels, 3, 3), f"b{i}": (width,)} | batch_norm(f"stuv{i}", width)
        channels = width
    last = f"r{len(widths) - 1}"
    body.append(f"p = AveragePool<kernel_shape=[2,2],strides=[2,2]>({last})\nf = Flatten(p)\ny = Gemm(f, g, h)")
    weights |= {"g": (channels * 9, classes), "h": (classes,)}
    return tiny(f"float[N,3,6,6] x => float[N,{classes}] y", "\n".join(body), weights)


def classes(inputs: int, count: int) -> Array:
    """The weight (inputs, count) of scores of classes: a softmax does not see what these have in common."""
    weight = np.random.default_rng(count).standard_normal((inputs, count)) / np.sqrt(inputs)
    return np.asarray(weight - weight.mean(axis=1, keepdims=True), np.float32)


def two_mlps(inputs: int, first: int, second: int) -> ir.Model:
    """Two blocks of so many neurons, which feed the scores of four classes."""
    body = "h = MatMul(x, w1) a = Relu(h) k = MatMul(a, w2) b = Relu(k) y = MatMul(b, w3)"
    weights: dict[str, Any] = {"w1": (inputs, first), "w2": (first, second), "w3": classes(second, 4)}
    return tiny(f"float[N,{inputs}] x => float[N,4] y", body, weights)


def batch_norm(names: str, width: int) -> dict[str, Array]:
    """Scale, bias, mean and (positive) variance; `names` is four letters and a common ending."""
    rng = np.random.default_rng(width)
    scale, bias, mean = rng.normal(size=(3, width)).astype(np.float32)
    variance = rng.uniform(0.5, 2.0, width).astype(np.float32)
    letters, ending = names[:4], names[4:]
    return {f"{letter}{ending}": a for letter, a in zip(letters, (scale + 1, bias, mean, variance), strict=True)}


def numbers(result: Any) -> dict[str, bytes]:
    """The weights of a result, which unlike its file does not say with what recipe they were made."""
    return {name: value.const_value.tobytes() for name, value in result.model.graph.initializers.items()}
