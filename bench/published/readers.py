"""Read the networks from their files; whatever a scale, a shift or a bias can be folded into exactly, it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from bench.published import transformer
from bench.published.transformer import Array, Ints, Layer, Net
from onnxgrail.graph.cost import counting
from onnxgrail.graph.io import model_file

EMBEDDINGS = ("word", "position", "token_type")
PLACES = {
    "q": "attention.self.query",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
PARTS = ("attention.qkv", "attention.proj", "fc1", "fc2")
PATCHES = 16
EPSILON = 1e-5  # of digits_vit


def llama(path: Path) -> Net:
    """Read char_llama: scales of norms are folded into the matrices after them."""
    values, matrices = held(path)
    size = 16
    scales = [value for name, value in values.items() if name.endswith("norm.weight")]
    layers = []
    for at, scale in enumerate(zip(scales[:-1:2], scales[1::2], strict=True)):
        names = ("q", "k", "v", "o", "gate", "up", "down")
        named = dict(zip(names, matrices[7 * at : 7 * at + 7], strict=True))
        for part, factor in zip((("q", "k", "v"), ("gate", "up")), scale, strict=True):
            named |= {name: factor[:, None] * named[name] for name in part}
        pairs = every(named["k"].shape[1] // size, size // 2)
        layers.append(Layer(**single(named), pairs=pairs))
    net = Net(
        embedding=values["llama.model.embed_tokens.weight"],
        layers=tuple(layers),
        head=scales[-1][:, None] * matrices[-1],
        frequencies=values["llama.model.rotary_emb.inv_freq"],
        causal=True,
        others=0,
        norms=sum(scale.size for scale in scales),
        channels=len(matrices[0]),
        head_size=size,
    )
    return counted(net, path)


def bert(path: Path) -> Net:
    """Read MiniLM: biases of keys change no softmax, and those of values are folded into the bias of `o`."""
    values, matrices = held(path)
    size = 32

    def stacked(name: str) -> Array:
        return np.stack([values[f"{name}.{part}"] for part in ("weight", "bias")])

    layers = []
    for at in range(len(matrices) // 6):
        named = dict(zip(("q", "k", "v", "o", "up", "down"), matrices[6 * at : 6 * at + 6], strict=True))
        root = f"bert.encoder.layer.{at}"
        bias = {name: values[f"{root}.{place}.bias"] for name, place in PLACES.items()}
        layer = Layer(
            **single(named),
            pairs=every(named["k"].shape[1] // size, size),
            bias_q=bias["q"],
            bias_o=bias["o"] + bias["v"] @ named["o"],
            bias_up=bias["up"],
            bias_down=bias["down"],
            norm_o=stacked(f"{root}.attention.output.LayerNorm"),
            norm_down=stacked(f"{root}.output.LayerNorm"),
        )
        layers.append(layer)
    words, positions, types = (values[f"bert.embeddings.{name}_embeddings.weight"] for name in EMBEDDINGS)
    net = Net(
        embedding=words,
        start=positions + types[0],
        norm=stacked("bert.embeddings.LayerNorm"),
        layers=tuple(layers),
        epsilon=1e-12,
        others=0,
        channels=words.shape[1],
        head_size=size,
    )
    return counted(net, path, gone=sum(2 * layer.k[0].shape[1] for layer in layers))


def vit(path: Path) -> Net:
    """Read digits_vit: norms are folded, means of channels are taken off where the stream is written."""
    values, matrices = held(path)
    size = 16

    def centered(value: Array) -> Array:
        return np.asarray(value - value.mean(axis=-1, keepdims=True))

    layers = []
    for at in range(len(matrices) // 4):
        qkv, o, up, down = matrices[4 * at : 4 * at + 4]
        bias_qkv, bias_o, bias_up, bias_down = (values[f"layers.{at}.{place}.bias"] for place in PARTS)
        one, two = (f"layers.{at}.norm{number}" for number in (1, 2))
        (q, bias_q), (k, _), (v, bias_v) = zip(
            np.split(values[f"{one}.weight"][:, None] * qkv, 3, axis=1),
            np.split(bias_qkv + values[f"{one}.bias"] @ qkv, 3),
            strict=True,
        )
        layer = Layer(
            **single({"q": q, "k": k, "v": v, "o": centered(o)}),
            **single({"up": values[f"{two}.weight"][:, None] * up, "down": centered(down)}),
            pairs=every(k.shape[1] // size, size),
            bias_q=bias_q,
            bias_o=centered(bias_o + bias_v @ o),
            bias_up=bias_up + values[f"{two}.bias"] @ up,
            bias_down=centered(bias_down),
        )
        layers.append(layer)
    start = values["positions"][0] + np.vstack([values["token"][0], np.tile(values["patches.bias"], (PATCHES, 1))])
    patches = values["patches.weight"]
    net = Net(
        embedding=centered(patches.reshape(len(patches), -1).T),
        start=centered(start),
        layers=tuple(layers),
        head=values["norm.weight"][:, None] * values["head.weight"].T,
        bias_head=values["head.bias"] + values["head.weight"] @ values["norm.bias"],
        first=True,
        epsilon=EPSILON,
        others=0,
        norms=sum(value.size for name, value in values.items() if "norm" in name),
        channels=len(patches),
        head_size=size,
    )
    return counted(net, path, gone=sum(2 * layer.k[0].shape[1] for layer in layers))


def counted(net: Net, path: Path, *, gone: int = 0) -> Net:
    """Return a network that counts what else the file holds, but for parameters that folding removes."""
    others = counting.parameters(model_file.load(path)) - transformer.parameters(net) - gone
    return transformer.widened(net, others=others)


def patches(images: Array) -> Array:
    """Return the features (n, positions, 4) of images (n, 1, 8, 8), with zeros in the place of the class token."""
    cut = images.reshape(len(images), 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(len(images), PATCHES, 4)
    return np.concatenate([np.zeros_like(cut[:, :1]), cut], axis=1)


def held(path: Path) -> tuple[dict[str, Array], list[Array]]:
    """Return the initializers by name, and those that a MatMul reads, in order."""
    graph = onnx.load(path).graph
    values = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    return values, [values[n.input[1]] for n in graph.node if n.op_type == "MatMul" and n.input[1] in values]


def every(groups: int, pairs: int) -> Ints:
    """Return the pairs of dense heads."""
    return np.tile(np.arange(pairs), (groups, 1))


def single(named: Mapping[str, Array]) -> dict[str, Any]:
    """Return matrices without factors."""
    return {name: (value,) for name, value in named.items()}
