"""The embedded language model in numpy, with any widths, factors of its matrices, and matrices on its skips."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from onnxgrail.graph.cost import counting
from onnxgrail.graph.io import model_file

Array = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Factors = tuple[Array, ...]  # of a matrix, from left to right
SHARED = 2  # query heads of a group, which has one key and one value head
EPSILON = 1e-6
BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A decoder layer: matrices (in, out), the kept rotary pairs (groups, pairs), biases, and matrices on the skips."""

    q: Factors
    k: Factors
    v: Factors
    o: Factors
    gate: Factors
    up: Factors
    down: Factors
    pairs: Ints
    bias_o: Array | None = None
    bias_down: Array | None = None
    skip_o: Array | None = None
    skip_down: Array | None = None


MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class Net:
    """The whole network. Scales of norms are folded into what reads them; `others` counts them and the constants."""

    embedding: Array
    layers: tuple[Layer, ...]
    head: Array
    frequencies: Array
    others: int
    channels: int = 128  # that the mean square of a norm is taken over
    head_size: int = 16  # before narrowing, for the scale of the softmax


def read(path: Path) -> Net:
    """Read the network from the embedded file."""
    graph = onnx.load(path).graph
    values = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    matrices = [values[n.input[1]] for n in graph.node if n.op_type == "MatMul" and n.input[1] in values]
    scales = [value for name, value in values.items() if name.endswith("norm.weight")]
    layers = []
    for at, scale in enumerate(zip(scales[:-1:2], scales[1::2], strict=True)):
        named = dict(zip(MATRICES, matrices[7 * at : 7 * at + 7], strict=True))
        for names, factor in zip((("q", "k", "v"), ("gate", "up")), scale, strict=True):
            named |= {name: factor[:, None] * named[name] for name in names}
        groups = named["k"].shape[1] // Net.head_size
        pairs = np.tile(np.arange(Net.head_size // 2), (groups, 1))
        layers.append(Layer(**{name: (value,) for name, value in named.items()}, pairs=pairs))
    net = Net(
        embedding=values["llama.model.embed_tokens.weight"],
        layers=tuple(layers),
        head=scales[-1][:, None] * matrices[-1],
        frequencies=values["llama.model.rotary_emb.inv_freq"],
        others=0,
    )
    return widened(net, others=counting.parameters(model_file.load(path)) - parameters(net))


def widened(net: Net, **changes: Any) -> Net:
    """Return a network with other parts."""
    return Net(**{field.name: getattr(net, field.name) for field in fields(net)} | changes)


def parameters(net: Net) -> int:
    """Count the numbers of all arrays and what else the file holds; positions of pairs are integers and don't count."""
    total = net.embedding.size + net.head.size + net.others
    for layer in net.layers:
        held = (getattr(layer, field.name) for field in fields(layer) if field.name != "pairs")
        total += sum(a.size for part in held for a in (part if isinstance(part, tuple) else (part,)) if a is not None)
    return total


def product(x: Array, factors: Factors) -> Array:
    """Multiply by the factors of a matrix."""
    for factor in factors:
        x = x @ factor
    return x


def normed(net: Net, x: Array) -> Array:
    """Divide by the root of the mean square over the original number of channels."""
    return np.asarray(x / np.sqrt((x * x).sum(-1, keepdims=True) / net.channels + EPSILON), dtype=np.float32)


def mixed(net: Net, layer: Layer, z: Array) -> Array:
    """Return what the heads give for normalized inputs (batch, sequence, channels): the inputs of the matrix `o`."""
    return np.concatenate([_mixed(net, layer, z[start : start + BATCH]) for start in range(0, len(z), BATCH)])


def _mixed(net: Net, layer: Layer, z: Array) -> Array:
    batch, length, groups = *z.shape[:2], len(layer.pairs)
    q, k, v = (product(z, getattr(layer, name)) for name in "qkv")
    q = _turned(net, layer, q.reshape(batch, length, groups, SHARED, -1)).transpose(0, 2, 3, 1, 4)
    k = _turned(net, layer, k.reshape(batch, length, groups, 1, -1)).transpose(0, 2, 3, 4, 1)
    scores = q @ k / np.float32(np.sqrt(net.head_size)) + np.triu(np.full((length, length), -1e9, np.float32), 1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    values = v.reshape(batch, length, groups, 1, -1).transpose(0, 2, 3, 1, 4)
    return np.asarray((shares @ values).transpose(0, 3, 1, 2, 4).reshape(batch, length, -1))


def _turned(net: Net, layer: Layer, x: Array) -> Array:
    """Apply the rotary positions to (batch, sequence, groups, heads, width)."""
    angles = np.arange(x.shape[1])[:, None, None] * net.frequencies[layer.pairs]
    cos, sin = (f(angles).astype(np.float32)[:, :, None] for f in (np.cos, np.sin))
    one, two = np.split(x, 2, axis=-1)
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


def hidden(layer: Layer, y: Array) -> Array:
    """Return the inputs of the matrix `down` for normalized inputs."""
    gate = product(y, layer.gate)
    return np.asarray(gate / (1 + np.exp(-gate)) * product(y, layer.up))


def after_heads(layer: Layer, x: Array, a: Array) -> Array:
    """Return the stream after the heads: `x` before the layer, `a` the inputs of `o`."""
    return _added(x, layer.skip_o, product(a, layer.o), layer.bias_o)


def after_mlp(layer: Layer, x: Array, h: Array) -> Array:
    """Return the stream after the layer: `x` after the heads, `h` the inputs of `down`."""
    return _added(x, layer.skip_down, product(h, layer.down), layer.bias_down)


def _added(x: Array, skip: Array | None, y: Array, bias: Array | None) -> Array:
    kept = x if skip is None else x @ skip
    return kept + y if bias is None else kept + y + bias


def steps(net: Net, ids: Ints) -> Iterator[tuple[Layer, dict[str, Array]]]:
    """Yield every layer with its values: streams `x`, `mid`, `out` and inputs of matrices `z`, `a`, `y`, `h`."""
    x = net.embedding[ids]
    for layer in net.layers:
        z = normed(net, x)
        a = mixed(net, layer, z)
        mid = after_heads(layer, x, a)
        y = normed(net, mid)
        h = hidden(layer, y)
        out = after_mlp(layer, mid, h)
        yield layer, {"x": x, "z": z, "a": a, "mid": mid, "y": y, "h": h, "out": out}
        x = out


def logits(net: Net, ids: Ints) -> Array:
    """Return the logits (batch, sequence, vocabulary)."""
    x = net.embedding[ids]
    for _, values in steps(net, ids):
        x = values["out"]
    return normed(net, x) @ net.head
