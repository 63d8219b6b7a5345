"""Write means over channels as products, so that they are compensated like all else that reads channels.

The mean over the channels that stay is another number than the mean over all. As a product with equal weights it is a
consumer: compensation gives the channels that stay weights of their own. ConvNeXt V2 has such a mean in every block, in
its global response normalization (Woo et al. 2023, arXiv 2301.00808).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Slot
from onnxgrail.graph.attributes import given, integer, integers, name_of, numbers_of
from onnxgrail.graph.flatten.branches import stand_beside
from onnxgrail.graph.io.model_file import copy
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.ops.tensors.reduce import MIXED
from onnxgrail.graph.rewrite.assign import sweep
from onnxgrail.graph.rewrite.unique import names_kept, take_place
from onnxgrail.graph.rotate.marked import MEAN
from onnxgrail.graph.rotate.norms import norms_of
from onnxgrail.graph.rotate.restore import AXES_INPUT
from onnxgrail.graph.trace.facts import Facts, key
from onnxgrail.graph.trace.survey import Survey
from onnxgrail.graph.trace.tracer import trace

OP = "ReduceMean"
MAPS = (3, 4, 5)  # ranks of what a convolution reads
SINGLE = 4  # bytes of a number; runtimes convolve no longer ones


def traced(model: ir.Model, facts: Facts, *, interface: bool = False, without: str = "") -> tuple[ir.Model, Survey]:
    """Trace a model in which those means are products that would otherwise keep blocks from being narrowed.

    Args:
        model: the graph; it is not changed.
        facts: concrete shapes and known values of its tensors.
        interface: as for `trace`.
        without: why nothing compensates for the means: they stay, and this is the reason for the channels before
            them. Empty if something does.

    Returns:
        The model, or a copy if it has such means, and its trace.
    """
    survey = trace(model, facts, interface=interface)
    if not any(refusal.op == OP and refusal.reason == MIXED for refusal in survey.refusals):
        return model, survey
    found = _means(model, facts)
    every = _written(model, facts, found)
    read = every.read(trace(every.model, every.facts, interface=interface))
    if without or not read:
        stuck = {slot.initializer for producers in read.values() for slot in producers}
        told = (replace(why, reason=without) if why.value in stuck else why for why in survey.refusals)
        return model, replace(survey, refusals=tuple(told))
    some = (
        every if len(read) == len(found) else _written(model, facts, [mean for mean in found if key(mean.node) in read])
    )
    return some.model, trace(some.model, some.facts, interface=interface)


@dataclass(frozen=True, slots=True, eq=False)
class _Mean:
    """A mean over one axis of the given length."""

    node: ir.Node
    axis: int
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class _Written:
    """A copy of a model with means as products, its facts, and the names of the means by that of their weights."""

    model: ir.Model
    facts: Facts
    means: dict[str, str]

    def read(self, survey: Survey) -> dict[str, tuple[Slot, ...]]:
        """Return the means that blocks read, mean -> producers of the block."""
        slots = ((slot.initializer, block) for block in survey.blocks for slot in block.consumers)
        return {self.means[name]: block.producers for name, block in slots if name in self.means}


def _means(model: ir.Model, facts: Facts) -> list[_Mean]:
    """Return the means of floats over channels alone that are in no normalization."""
    normed = {node for norm in norms_of(model, facts) for node in norm.nodes}
    found = (_mean(node, facts) for node in model.graph if node.op_type == OP and node not in normed)
    return [mean for mean in found if mean is not None]


def _mean(node: ir.Node, facts: Facts) -> _Mean | None:
    """Return the mean that a node computes, if a matrix or a convolution of one tap can compute it."""
    name = name_of(node, 0)
    shape, told = facts.shapes.get(name), facts.values.get(name_of(node, 1))
    axes = integers(node, "axes") if told is None else tuple(int(a) for a in told.ravel())
    if not shape or len(axes) != 1 or not integer(node, "keepdims", 1) or name in facts.constants:
        return None
    axis = axes[0] % len(shape)
    last, mapped = axis == len(shape) - 1, axis == 1 and len(shape) in MAPS
    fits = last or (mapped and facts.dtypes[name].itemsize <= SINGLE)
    return _Mean(node, axis, shape[axis]) if fits and facts.has_floats(name) and shape[axis] > 1 else None


def _written(source: ir.Model, facts: Facts, means: Iterable[_Mean]) -> _Written:
    """Write means as products in a copy of a model."""
    model = copy(source)
    nodes, names, shapes = {key(node): node for node in model.graph}, dict[str, str](), dict[str, tuple[int, ...]]()
    with names_kept(model.graph):
        for mean in means:
            name = key(mean.node)
            weight = _multiply(model.graph, nodes[name], mean, facts)
            names[weight.name or ""] = name
            shapes[weight.name or ""] = numbers_of(weight).shape
    dtypes = {weight: facts.dtypes[mean] for weight, mean in names.items()}
    known = replace(
        facts,
        shapes={**facts.shapes, **shapes},
        dtypes={**facts.dtypes, **dtypes},
        constants=facts.constants | names.keys(),
    )
    return _Written(model, known, names)


def _multiply(graph: ir.Graph, node: ir.Node, mean: _Mean, facts: Facts) -> ir.Value:
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
    weight, axis = given(product, 1), np.array([-1 if product.op_type == "MatMul" else 1])
    read, attributes = [given(product, 0)], [ir.AttrInt64("keepdims", 1)]
    if opset < AXES_INPUT:
        attributes.append(ir.AttrInt64s("axes", axis.tolist()))
    else:
        read.append(constant(graph, axis, f"{key(product)}/axes"))
    node = ir.Node("", OP, read, attributes, num_outputs=1, name=product.name)
    node.metadata_props.update({name: text for name, text in product.metadata_props.items() if name != MEAN})
    stand_beside(node, product)
    graph.insert_before(product, node)
    take_place(product.outputs[0], node.outputs[0])
    graph.remove(product, safe=True)
    sweep(graph, [weight])
