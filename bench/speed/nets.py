"""Networks with random weights and the shapes of real ones, written node by node, without downloads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET, IR = 17, 8
STAGES = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}


@dataclass(slots=True)
class Writer:
    """A graph under construction; every method adds nodes and returns the name of their output."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    nodes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output."""
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, array: Any) -> str:
        """Add an initializer."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def matrix(self, *shape: int, fan: int) -> str:
        """Add random weights that keep the scale of their input."""
        return self.constant(self.rng.standard_normal(shape, dtype=np.float32) * np.float32(fan**-0.5))

    def conv(self, x: str, inputs: int, outputs: int, kernel: int, stride: int = 1, gain: float = 1.4) -> str:
        """Add a convolution with folded batch normalization."""
        fan = inputs * kernel * kernel
        weight = self.matrix(outputs, inputs, kernel, kernel, fan=fan / gain**2)  # type: ignore[arg-type]
        bias = self.constant(np.zeros(outputs, np.float32))
        pads = [kernel // 2] * 4
        return self.op("Conv", x, weight, bias, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        """Add MatMul and Add."""
        product = self.op("MatMul", x, self.matrix(inputs, outputs, fan=inputs))
        return self.op("Add", product, self.constant(np.zeros(outputs, np.float32)))

    def norm(self, x: str, width: int) -> str:
        """Add layer normalization over the last axis."""
        scale, shift = self.constant(np.ones(width, np.float32)), self.constant(np.zeros(width, np.float32))
        return self.op("LayerNormalization", x, scale, shift, axis=-1)

    def gelu(self, x: str) -> str:
        """Add the exact GELU, as exporters decompose it below opset 20."""
        erf = self.op("Erf", self.op("Div", x, self.constant(np.float32(2**0.5))))
        half = self.op("Mul", x, self.op("Add", erf, self.constant(np.float32(1))))
        return self.op("Mul", half, self.constant(np.float32(0.5)))

    def attention(self, x: str, width: int, heads: int, tokens: int) -> str:
        """Add multi-head self-attention with its output projection."""
        size = width // heads
        shape = self.constant(np.array([-1, tokens, heads, size]))

        def split(y: str, perm: list[int]) -> str:
            return self.op("Transpose", self.op("Reshape", y, shape), perm=perm)

        q = split(self.linear(x, width, width), [0, 2, 1, 3])
        k = split(self.linear(x, width, width), [0, 2, 3, 1])
        v = split(self.linear(x, width, width), [0, 2, 1, 3])
        scores = self.op("Mul", self.op("MatMul", q, k), self.constant(np.float32(size**-0.5)))
        mixed = self.op("Transpose", self.op("MatMul", self.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        joined = self.op("Reshape", mixed, self.constant(np.array([-1, tokens, width])))
        return self.linear(joined, width, width)

    def layer(self, x: str, width: int, heads: int, tokens: int) -> str:
        """Add one pre-norm transformer layer."""
        x = self.op("Add", x, self.attention(self.norm(x, width), width, heads, tokens))
        hidden = self.gelu(self.linear(self.norm(x, width), width, 4 * width))
        return self.op("Add", x, self.linear(hidden, 4 * width, width))

    def save(
        self, path: Path, output: str, shape: tuple[Any, ...], outputs: tuple[Any, ...], *, external: bool = False
    ) -> Path:
        """Write the model with input `x` and one output; its weights in a separate file if `external`."""
        last = self.op("Identity", output)
        graph = helper.make_graph(
            self.nodes,
            path.stem,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *shape])],
            [helper.make_tensor_value_info(last, TensorProto.FLOAT, ["batch", *outputs])],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
        beside = {"save_as_external_data": True, "location": f"{path.name}.data"} if external else {}
        onnx.save(model, path, **beside)
        return path


def resnet(path: Path, name: str) -> Path:
    """Write a ResNet-18 or ResNet-50 at 224 x 224."""
    net, deep = Writer(), name == "resnet50"
    x = net.op("Relu", net.conv("x", 3, 64, 7, 2))
    x = net.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    width = 64
    for stage, blocks in enumerate(STAGES[name]):
        inner = 64 * 2**stage
        outer = inner * (4 if deep else 1)
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = _bottleneck(net, x, width, inner, stride) if deep else _basic(net, x, width, inner, stride)
            if stride > 1 or width != outer:
                x = net.conv(x, width, outer, 1, stride, gain=1.0)
            x, width = net.op("Relu", net.op("Add", x, y)), outer
    x = net.op("Flatten", net.op("GlobalAveragePool", x))
    return net.save(path, net.linear(x, width, 1000), (3, 224, 224), (1000,))


def _basic(net: Writer, x: str, width: int, inner: int, stride: int) -> str:
    return net.conv(net.op("Relu", net.conv(x, width, inner, 3, stride)), inner, inner, 3, gain=0.5)


def _bottleneck(net: Writer, x: str, width: int, inner: int, stride: int) -> str:
    y = net.op("Relu", net.conv(x, width, inner, 1))
    y = net.op("Relu", net.conv(y, inner, inner, 3, stride))
    return net.conv(y, inner, 4 * inner, 1, gain=0.5)


def vit(path: Path) -> Path:
    """Write a ViT-B/32 at 224 x 224, with the mean of its patches instead of a class token."""
    net, width, tokens = Writer(), 768, 49
    patches = net.op("Conv", "x", net.matrix(width, 3, 32, 32, fan=3072), kernel_shape=[32, 32], strides=[32, 32])
    flat = net.op("Reshape", patches, net.constant(np.array([-1, width, tokens])))
    x = net.op("Transpose", flat, perm=[0, 2, 1])
    for _ in range(12):
        x = net.layer(x, width, 12, tokens)
    pooled = net.op("ReduceMean", net.norm(x, width), axes=[1], keepdims=0)
    return net.save(path, net.linear(pooled, width, 1000), (3, 224, 224), (1000,))


def encoder(path: Path, *, depth: int, width: int, tokens: int, external: bool = True) -> Path:
    """Write a transformer encoder on vectors."""
    net, x = Writer(), "x"
    for _ in range(depth):
        x = net.layer(x, width, max(1, width // 64), tokens)
    return net.save(path, net.norm(x, width), (tokens, width), (tokens, width), external=external)
