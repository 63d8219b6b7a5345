"""Write means over channels as products, so that they are compensated like all else that reads channels.

The mean over the channels that stay is another number than the mean over all. As a product with equal weights it is a
consumer: compensation gives the channels that stay weights of their own. ConvNeXt V2 has such a mean in every block, in
its global response normalization (Woo et al. 2023, arXiv 2301.00808).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrail.graph.attributes import given, integer, name_of, numbers_of
from onnxgrail.graph.flatten.branches import stand_beside
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.assign import sweep
from onnxgrail.graph.rewrite.unique import names_kept, take_place
from onnxgrail.graph.rotate.marked import MEAN
from onnxgrail.graph.rotate.norms import Norm
from onnxgrail.graph.rotate.restore import AXES_INPUT
from onnxgrail.graph.trace.facts import Facts, axes_of, key

OP = "ReduceMean"
MAPS = (3, 4, 5)  # ranks of what a convolution reads
SINGLE = 4  # bytes of a number; runtimes convolve no longer ones


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """A mean over one axis of the given length."""

    node: ir.Node
    axis: int
    width: int


def means_of(model: ir.Model, facts: Facts, norms: Iterable[Norm]) -> list[Mean]:
    """Return the means of floats over channels alone that are in none of the normalizations."""
    normed = {node for norm in norms for node in norm.nodes}
    found = (_mean(node, facts) for node in model.graph if node.op_type == OP and node not in normed)
    return [mean for mean in found if mean is not None]


def _mean(node: ir.Node, facts: Facts) -> Mean | None:
    """Return the mean that a node computes, if a matrix or a convolution of one tap can compute it."""
    name = name_of(node, 0)
    shape = facts.shapes.get(name)
    axes = axes_of(node, facts) if shape and name not in facts.constants else []
    if not shape or len(axes) != 1 or not integer(node, "keepdims", 1):
        return None
    axis = axes[0]
    last, mapped = axis == len(shape) - 1, axis == 1 and len(shape) in MAPS
    fits = last or (mapped and facts.dtypes[name].itemsize <= SINGLE)
    return Mean(node, axis, shape[axis]) if fits and facts.has_floats(name) and shape[axis] > 1 else None


def as_products(model: ir.Model, facts: Facts, means: Iterable[Mean]) -> Facts:
    """Write means as products, in place; return the facts with the new weights."""
    nodes, weights = {key(node): node for node in model.graph}, dict[str, tuple[str, ir.Value]]()
    with names_kept(model.graph):
        for mean in means:
            name = key(mean.node)
            weight = _multiply(model.graph, nodes[name], mean, facts)
            weights[weight.name or ""] = (name, weight)
    shapes = {name: numbers_of(weight).shape for name, (_, weight) in weights.items()}
    dtypes = {name: facts.dtypes[mean] for name, (mean, _) in weights.items()}
    return replace(
        facts,
        shapes={**facts.shapes, **shapes},
        dtypes={**facts.dtypes, **dtypes},
        constants=facts.constants | weights.keys(),
    )


def _multiply(graph: ir.Graph, node: ir.Node, mean: Mean, facts: Facts) -> ir.Value:
    """Replace the node of a mean by a product with equal weights, and return these."""
    value, name = given(node, 0), key(node)
    rank, dtype = len(facts.shapes[name]), facts.dtypes[name]
    last = mean.axis == rank - 1
    shape = (mean.width, 1) if last else (1, mean.width, *[1] * (rank - 2))
    weight = constant(graph, np.full(shape, 1 / mean.width, dtype), f"{name}/weights")
    product = ir.Node("", "MatMul" if last else "Conv", [value, weight], num_outputs=1, name=node.name)
    product.metadata_props.update({**node.metadata_props, MEAN: ""})
    stand_beside(product, node)
    graph.insert_before(node, product)
    take_place(node.outputs[0], product.outputs[0])
    graph.remove(node, safe=True)
    return weight


def as_means(model: ir.Model) -> None:
    """Write products as the means that they still are, in place: those whose weights no fit has changed."""
    graph = model.graph
    with names_kept(graph):
        for node in [node for node in graph if MEAN in node.metadata_props]:
            weight = node.inputs[1]
            if weight is None or weight.const_value is None:
                continue
            numbers = numbers_of(weight)
            if (numbers == np.asarray(1 / numbers.size, numbers.dtype)).all():
                _average(graph, node, opset_of(model))


def _average(graph: ir.Graph, product: ir.Node, opset: int) -> None:
    """Replace a product with equal weights by the mean that it is."""
    weight, axis = given(product, 1), -1 if product.op_type == "MatMul" else 1
    node = mean_over(graph, given(product, 0), [axis], opset)
    node.name = product.name
    node.metadata_props.update({name: text for name, text in product.metadata_props.items() if name != MEAN})
    stand_beside(node, product)
    graph.insert_before(product, node)
    take_place(product.outputs[0], node.outputs[0])
    graph.remove(product, safe=True)
    sweep(graph, [weight])


def mean_over(graph: ir.Graph, value: ir.Value, axes: Sequence[int], opset: int) -> ir.Node:
    """Return a node that is not in the graph yet, with the mean over axes, which stay with length 1."""
    read, attributes = [value], [ir.AttrInt64("keepdims", 1)]
    if opset < AXES_INPUT:
        attributes.append(ir.AttrInt64s("axes", axes))
    else:
        read.append(constant(graph, np.array(axes), f"{value.name}/axes"))
    return ir.Node("", OP, read, attributes, num_outputs=1)
