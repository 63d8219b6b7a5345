"""Let random nodes draw the same numbers in every run, so that the outputs of two models or two runs can be compared.

A model draws where it samples a latent (a VAE, a voice, a diffusion model) or an action.  Each number becomes a
function of its place and of the name of the node's output.  Nodes of a narrowed model and of a part of a model keep
that name, so they draw the same numbers as the original.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.graph.io.soundness import bodies
from onnxgrail.graph.trace.facts import RANDOM

SINCE, TYPED = 9, 15  # opsets with ConstantOfShape, and with CastLike
TURNS = (12.9898, 43758.5453123), (78.233, 12543.8437)  # per stream, of a hash that is common in computer graphics
LEAST = 1e-12  # of the numbers whose logarithm is taken


def random_ops(model: ir.Model) -> list[str]:
    """Return the kinds of nodes that `steady` changes, sorted."""
    if model.opset_imports.get("", 0) < SINCE:
        return []
    return sorted({node.op_type for node in model.graph.all_nodes() if _draws(node)})


def steady(proto: onnx.ModelProto) -> None:
    """Replace random nodes by nodes that compute numbers of the same distribution from their places, in place.

    A node stays if the type of its numbers is not known: that of another tensor, before opset 15.
    """
    _graph(proto.graph, next(one.version for one in proto.opset_import if not one.domain))


def _graph(graph: onnx.GraphProto, version: int) -> None:
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for attribute in node.attribute:
            for body in bodies(attribute):
                _graph(body, version)
        nodes += (_made(node, version) if _draws(node) else []) or [node]
    del graph.node[:]
    graph.node.extend(nodes)


def _draws(node: ir.Node | onnx.NodeProto) -> bool:
    return node.op_type in RANDOM and not node.domain


class _Nodes:
    """Collects nodes whose values are named after one output."""

    def __init__(self, name: str) -> None:
        self.made: list[onnx.NodeProto] = []
        self._name = name

    def add(self, op: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Append a node; return the name of its output."""
        output = output or f"{self._name}/drawn{len(self.made)}"
        self.made.append(onnx.helper.make_node(op, list(inputs), [output], name=output, **attributes))
        return output

    def number(self, value: Any, kind: type = np.float64) -> str:
        """Append a constant; return its name."""
        return self.add("Constant", value=onnx.numpy_helper.from_array(np.array(value, dtype=kind)))


def _made(node: onnx.NodeProto, version: int) -> list[onnx.NodeProto]:
    """Return the nodes in place of one; none if the type of its numbers is not known."""
    known = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    nodes = _Nodes(node.output[0])
    shape = nodes.add("Shape", node.input[0]) if node.input else nodes.number(known["shape"], np.int64)
    if node.op_type == "Multinomial":
        return _picked(node, nodes, shape, known)
    asked = known.get("dtype", 0 if node.input else onnx.TensorProto.FLOAT)
    if not asked and version < TYPED:
        return []
    numbers = nodes.add("Reshape", _numbers(node, nodes, _uniforms(node, nodes, shape), known), shape)
    if asked:
        nodes.add("Cast", numbers, output=node.output[0], to=asked)
    else:
        nodes.add("CastLike", numbers, node.input[0], output=node.output[0])
    return nodes.made


def _picked(node: onnx.NodeProto, nodes: _Nodes, shape: str, known: dict[str, Any]) -> list[onnx.NodeProto]:
    """Return nodes that draw classes from (samples, classes) logarithms of chances, as the highest after noise.

    Gumbel 1954, Statistical Theory of Extreme Values: log p - log(-log u) is highest for a class with probability p.
    """
    whole, one = (
        nodes.add("Concat", shape, nodes.number([size], np.int64), axis=0) for size in (known.get("sample_size", 1), 1)
    )
    inside = nodes.add("Mul", next(_uniforms(node, nodes, whole)), nodes.number(1 - 2 * LEAST))
    waits = nodes.add("Neg", nodes.add("Log", nodes.add("Add", inside, nodes.number(LEAST))))
    noise = nodes.add("Reshape", nodes.add("Neg", nodes.add("Log", waits)), whole)
    chances = nodes.add("Reshape", nodes.add("Cast", node.input[0], to=onnx.TensorProto.DOUBLE), one)
    scores = nodes.add("Cast", nodes.add("Add", chances, noise), to=onnx.TensorProto.FLOAT)
    classes = nodes.add("ArgMax", scores, axis=1, keepdims=0)
    nodes.add("Cast", classes, output=node.output[0], to=known.get("dtype", onnx.TensorProto.INT32))
    return nodes.made


def _uniforms(node: onnx.NodeProto, nodes: _Nodes, shape: str) -> Iterator[str]:
    """Yield the names of rows of numbers in 0..1, one number per place of a shape; the rows are independent."""
    every = nodes.add("ConstantOfShape", shape, value=onnx.numpy_helper.from_array(np.ones(1, np.int64)))
    flat = nodes.add("Reshape", every, nodes.number([-1], np.int64))
    places = nodes.add("Reshape", nodes.add("NonZero", flat), nodes.number([-1], np.int64))
    places = nodes.add("Cast", places, to=onnx.TensorProto.DOUBLE)
    return (_uniform(nodes, places, *turns, node.output[0]) for turns in TURNS)


def _uniform(nodes: _Nodes, places: str, turn: float, size: float, name: str) -> str:
    """Return the name of numbers in 0..1, one per place."""
    salt = zlib.crc32(name.encode()) / 2**32 * math.tau
    turned = nodes.add("Add", nodes.add("Mul", places, nodes.number(turn)), nodes.number(salt))
    large = nodes.add("Mul", nodes.add("Sin", turned), nodes.number(size))
    return nodes.add("Sub", large, nodes.add("Floor", large))


def _numbers(node: onnx.NodeProto, nodes: _Nodes, uniform: Iterator[str], known: dict[str, Any]) -> str:
    """Return the name of the numbers of a node's distribution, in a row."""
    first = next(uniform)
    if node.op_type == "Bernoulli":
        flat = nodes.add("Reshape", node.input[0], nodes.number([-1], np.int64))
        chances = nodes.add("Cast", flat, to=onnx.TensorProto.DOUBLE)
        return nodes.add("Cast", nodes.add("Less", first, chances), to=onnx.TensorProto.FLOAT)
    if node.op_type.startswith("RandomUniform"):
        low, high = known.get("low", 0.0), known.get("high", 1.0)
        return nodes.add("Add", nodes.add("Mul", first, nodes.number(high - low)), nodes.number(low))
    logarithm = nodes.add("Log", nodes.add("Add", first, nodes.number(LEAST)))
    radius = nodes.add("Sqrt", nodes.add("Mul", logarithm, nodes.number(-2.0)))
    # A sine, since releases of ONNX Runtime up to 1.28 have no cosine of doubles.
    turned = nodes.add("Sin", nodes.add("Mul", next(uniform), nodes.number(math.tau)))
    normal = nodes.add("Mul", nodes.add("Mul", radius, turned), nodes.number(known.get("scale", 1.0)))
    return nodes.add("Add", normal, nodes.number(known.get("mean", 0.0)))
