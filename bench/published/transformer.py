"""Transformers in numpy, with any widths, factors of their matrices, and matrices on their skips.

Decoders and encoders are alike here: root mean squares before the halves of a layer or norms with scales after them,
gated neurons or the exact GELU, rotary positions or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import erf

Array = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Factors = tuple[Array, ...]  # of a matrix, from left to right
BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer: matrices (in, out), biases, matrices on the skips, and (scale, shift) of the norms after the sums.

    `pairs` are the kept rotary pairs (groups, pairs), without rotary positions the kept channels of queries and keys.
    """

    q: Factors
    k: Factors
    v: Factors
    o: Factors
    gate: Factors = ()
    up: Factors
    down: Factors
    pairs: Ints
    bias_q: Array | None = None
    bias_o: Array | None = None
    bias_up: Array | None = None
    bias_down: Array | None = None
    skip_o: Array | None = None
    skip_down: Array | None = None
    norm_o: Array | None = None
    norm_down: Array | None = None

    @property
    def shared(self) -> int:
        """Return the number of query heads of a group, which has one key and one value head."""
        return int(self.q[-1].shape[1] // self.k[-1].shape[1])

    @property
    def parts(self) -> int:
        """Return the number of channels that a kept pair stands for."""
        return int(self.k[-1].shape[1] // self.pairs.size)

    @property
    def matrices(self) -> tuple[str, ...]:
        """Return the names of the matrices that the layer has."""
        return tuple(name for name in ("q", "k", "v", "o", "gate", "up", "down") if getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Net:
    """The whole network. Scales of norms before matrices are folded into them; `others` counts them and constants."""

    embedding: Array  # (words, channels), or (features, channels) of inputs that are no numbers of words
    layers: tuple[Layer, ...]
    others: int
    norms: int = 0  # how many of the others are scales and shifts of norms that are folded
    start: Array | None = None  # (length, channels), added to what the embedding gives
    norm: Array | None = None  # (scale, shift) of a norm of the first stream
    head: Array | None = None  # without a head the last stream is the output
    bias_head: Array | None = None
    frequencies: Array | None = None  # of rotary positions
    causal: bool = False
    first: bool = False  # the head reads the first position only
    epsilon: float = 1e-6
    channels: int  # that the mean square of a norm is taken over
    head_size: int  # before narrowing, for the scale of the softmax


def widened(net: Net, **changes: Any) -> Net:
    """Return a network with other parts."""
    return Net(**{field.name: getattr(net, field.name) for field in fields(net)} | changes)


def parameters(net: Net) -> int:
    """Count the numbers of all arrays and what else the file holds; positions of pairs are integers and don't count."""
    ends = (net.embedding, net.start, net.norm, net.head, net.bias_head)
    total = net.others + sum(a.size for a in ends if a is not None)
    for layer in net.layers:
        held = (getattr(layer, field.name) for field in fields(layer) if field.name != "pairs")
        total += sum(a.size for part in held for a in (part if isinstance(part, tuple) else (part,)) if a is not None)
    return total


def product(x: Array, factors: Factors, bias: Array | None = None) -> Array:
    """Multiply by the factors of a matrix, and add a bias."""
    for factor in factors:
        x = x @ factor
    return x if bias is None else x + bias


def normed(net: Net, x: Array) -> Array:
    """Return what the matrices of a half of a layer read: the stream itself if its norms come after the sums.

    Otherwise it is divided by the root of the mean square over the original number of channels.
    """
    if net.norm is not None:
        return x
    return np.asarray(x / np.sqrt((x * x).sum(-1, keepdims=True) / net.channels + net.epsilon), dtype=np.float32)


def mixed(net: Net, layer: Layer, z: Array) -> Array:
    """Return what the heads give for inputs (batch, sequence, channels): the inputs of the matrix `o`."""
    return np.concatenate([_mixed(net, layer, z[start : start + BATCH]) for start in range(0, len(z), BATCH)])


def _mixed(net: Net, layer: Layer, z: Array) -> Array:
    batch, length, groups = *z.shape[:2], len(layer.pairs)
    q, k, v = product(z, layer.q, layer.bias_q), product(z, layer.k), product(z, layer.v)
    q = _turned(net, layer, q.reshape(batch, length, groups, layer.shared, -1)).transpose(0, 2, 3, 1, 4)
    k = _turned(net, layer, k.reshape(batch, length, groups, 1, -1)).transpose(0, 2, 3, 4, 1)
    scores = q @ k / np.float32(np.sqrt(net.head_size))
    if net.causal:
        scores = scores + np.triu(np.full((length, length), -1e9, np.float32), 1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    values = v.reshape(batch, length, groups, 1, -1).transpose(0, 2, 3, 1, 4)
    return np.asarray((shares @ values).transpose(0, 3, 1, 2, 4).reshape(batch, length, -1))


def _turned(net: Net, layer: Layer, x: Array) -> Array:
    """Apply the rotary positions, if there are any, to (batch, sequence, groups, heads, width)."""
    if net.frequencies is None:
        return x
    angles = np.arange(x.shape[1])[:, None, None] * net.frequencies[layer.pairs]
    cos, sin = (f(angles).astype(np.float32)[:, :, None] for f in (np.cos, np.sin))
    one, two = np.split(x, 2, axis=-1)
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)


def hidden(layer: Layer, y: Array) -> Array:
    """Return the inputs of the matrix `down` for the inputs of the neurons."""
    up = product(y, layer.up, layer.bias_up)
    if not layer.gate:
        return np.asarray(up * (0.5 + 0.5 * erf(up * np.float32(0.5**0.5))), dtype=np.float32)
    gate = product(y, layer.gate)
    return np.asarray(gate / (1 + np.exp(-gate)) * up)


def after_heads(net: Net, layer: Layer, x: Array, a: Array) -> Array:
    """Return the stream after the heads: `x` before the layer, `a` the inputs of `o`."""
    return scaled(net, layer.norm_o, _added(x, layer.skip_o, product(a, layer.o), layer.bias_o))


def after_mlp(net: Net, layer: Layer, x: Array, h: Array) -> Array:
    """Return the stream after the layer: `x` after the heads, `h` the inputs of `down`."""
    return scaled(net, layer.norm_down, _added(x, layer.skip_down, product(h, layer.down), layer.bias_down))


def _added(x: Array, skip: Array | None, y: Array, bias: Array | None) -> Array:
    kept = x if skip is None else x @ skip
    return kept + y if bias is None else kept + y + bias


def scaled(net: Net, norm: Array | None, x: Array) -> Array:
    """Apply a norm with (scale, shift) over the channels, or nothing."""
    if norm is None:
        return x
    x = x - x.mean(-1, keepdims=True)
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + net.epsilon) * norm[0] + norm[1], dtype=np.float32)


def entered(net: Net, inputs: Array | Ints) -> Array:
    """Return the first stream, of numbers of words (batch, sequence) or of features (batch, sequence, features)."""
    x = inputs @ net.embedding if inputs.ndim == 3 else net.embedding[inputs]
    return scaled(net, net.norm, x if net.start is None else x + net.start[: x.shape[1]])


def steps(net: Net, inputs: Array | Ints) -> Iterator[tuple[Layer, dict[str, Array]]]:
    """Yield every layer with its values: streams `x`, `mid`, `out` and inputs of matrices `z`, `a`, `y`, `h`."""
    x = entered(net, inputs)
    for layer in net.layers:
        z = normed(net, x)
        a = mixed(net, layer, z)
        mid = after_heads(net, layer, x, a)
        y = normed(net, mid)
        h = hidden(layer, y)
        out = after_mlp(net, layer, mid, h)
        yield layer, {"x": x, "z": z, "a": a, "mid": mid, "y": y, "h": h, "out": out}
        x = out


def outputs(net: Net, inputs: Array | Ints) -> Array:
    """Return the logits (batch, sequence, classes) or (batch, classes), or the last stream if there is no head."""
    x = entered(net, inputs)
    for _, values in steps(net, inputs):
        x = values["out"]
    if net.head is None:
        return x
    return product(normed(net, x[:, 0] if net.first else x), (net.head,), net.bias_head)
