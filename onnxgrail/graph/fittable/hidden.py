"""Normalizations of hidden channels, which run over the channels that stay.

A layer writes the channels, a normalization alone reads them, and what follows reads only the normalized ones: a linear
layer, its normalization and an activation, as in many MLPs, or a convolution of a speech encoder. The statistics of the
channels that stay are others than those of all. The layers after it are fitted to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Bools
from onnxgrail.graph.attributes import given, integer, maker_of, name_of, names_of, number
from onnxgrail.graph.fittable.means import OP, mean_over
from onnxgrail.graph.flatten.branches import stand_beside
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import free_name, names_kept, take_place
from onnxgrail.graph.rotate.marked import LEFT
from onnxgrail.graph.rotate.norms import EPSILON, FUSED, Norm
from onnxgrail.graph.trace.facts import Facts, axes_of, key
from onnxgrail.graph.trace.survey import Survey

INSTANCE, GROUP = "InstanceNormalization", "GroupNormalization"
SINGLE = 4  # bytes of a number; squares of shorter ones overflow
MAPS = 3  # least rank with channels and positions


@dataclass(frozen=True, slots=True, eq=False)
class Hidden:
    """A normalization, or a mean that may be a part of one.

    Attributes:
        source: what it normalizes, with channels on `axis`.
        nodes: those that compute statistics of all channels.
    """

    source: ir.Value
    axis: int
    nodes: tuple[ir.Node, ...]


def hidden_norms(model: ir.Model, facts: Facts, norms: Iterable[Norm]) -> list[Hidden]:
    """Return the normalizations whose channels may be hidden: of rows, and of all channels and positions at once.

    Args:
        model: the graph.
        facts: of it.
        norms: its normalizations of rows.
    """
    found = [_of_rows(norm, facts) for norm in norms if _alone(norm, facts) and _reduces(norm)]
    taken = {node for one in found for node in one.nodes}
    maps = (_of_maps(node, facts) for node in model.graph if node not in taken)
    return [one for one in (*found, *maps) if one is not None and _fits(one.source, facts)]


def _of_rows(norm: Norm, facts: Facts) -> Hidden:
    nodes = tuple(node for node in norm.nodes if node.op_type in (OP, *FUSED))
    return Hidden(norm.source, len(facts.shapes[norm.source.name or ""]) - 1, nodes)


def _alone(norm: Norm, facts: Facts) -> bool:
    """Return True if nothing else reads the channels, and they are no sum of others, as in a residual stream."""
    maker = norm.source.producer()
    if maker is not None and maker.op_type == "Add" and facts.constants.isdisjoint(names_of(maker.inputs)):
        return False
    return not norm.source.is_graph_output() and all(use.node in norm.nodes for use in norm.source.uses())


def _reduces(norm: Norm) -> bool:
    """Return True if all that it computes over the channels are means."""
    if norm.nodes[0].op_type in FUSED:
        return True
    ops = [node.op_type for node in norm.nodes]
    return ops.count(OP) == 1 + norm.centered and not {"ReduceL2", "ReduceSum", "GlobalAveragePool"} & {*ops}


def _of_maps(node: ir.Node, facts: Facts) -> Hidden | None:
    """Return a normalization of all channels and positions: one group, or a mean over several axes."""
    source, shape = node.inputs[0] if node.inputs else None, facts.shapes.get(name_of(node, 0), ())
    if source is None or len(shape) < MAPS:
        return None
    if node.op_type == INSTANCE and len(shape) == MAPS and shape[1] == 1:
        maker = source.producer()
        before = maker.inputs[0] if maker is not None and maker.op_type == "Reshape" else None
        return None if before is None else Hidden(before, 1, (node,))
    axes = axes_of(node, facts) if node.op_type == OP and integer(node, "keepdims", 1) else []
    several = len(axes) > 1 and 1 in axes
    one = node.op_type == GROUP and integer(node, "num_groups") == 1
    return Hidden(source, 1, (node,)) if several or one else None


def _fits(source: ir.Value, facts: Facts) -> bool:
    name = source.name or ""
    return facts.has_floats(name) and facts.dtypes[name].itemsize >= SINGLE and name not in facts.constants


def run_over_those_left(model: ir.Model, norms: Sequence[Hidden]) -> None:
    """Mark normalizations that run over the channels that stay, in place."""
    nodes = {key(node): node for node in model.graph}
    for node in (node for norm in norms for node in norm.nodes):
        nodes[key(node)].metadata_props[LEFT] = ""


def leave_out(model: ir.Model, survey: Survey, dead: Bools) -> None:
    """Let the marked normalizations of a model of full width leave out dead channels, in place.

    Args:
        model: changed in place.
        survey: its trace.
        dead: (ids,) mask of channels.
    """
    graph, facts = model.graph, survey.facts
    with names_kept(graph):
        for node in [node for node in graph if LEFT in node.metadata_props]:
            name, axes = name_of(_reader(node), 0), _over(node, facts)
            marks = (mark for mark in survey.marks.get(name, ()) if mark.axes[0] in axes and dead[mark.labels].any())
            for mark in islice(marks, 1):
                _Writer(model, node, facts).write(~dead[mark.labels], mark.axes[0])


def _reader(node: ir.Node) -> ir.Node:
    """Return the node that reads channels on an axis of their own: a Reshape before an instance normalization."""
    maker = maker_of(node, 0) if node.op_type == INSTANCE else None
    return node if maker is None else maker


def _over(node: ir.Node, facts: Facts) -> list[int]:
    """Return the axes of channels and positions that a marked node computes statistics over."""
    rank = len(facts.shapes[name_of(_reader(node), 0)])
    if node.op_type in FUSED:
        return [rank - 1]
    return axes_of(node, facts) if node.op_type == OP else list(range(1, rank))


class _Writer:
    """Replaces a mean or a normalization by one over some of the positions of an axis."""

    def __init__(self, model: ir.Model, node: ir.Node, facts: Facts) -> None:
        self.graph, self.node, self.opset = model.graph, node, opset_of(model)
        name = name_of(_reader(node), 0)
        self.dtype, self.rank, self.axes = facts.dtypes[name], len(facts.shapes[name]), _over(node, facts)

    def write(self, stays: Bools, axis: int) -> None:
        """Replace the node; positions go along the axis."""
        reader = _reader(self.node)
        value = given(reader, 0)
        self.mask = self._constant(stays.reshape([-1 if a == axis else 1 for a in range(self.rank)]))
        self.share = self._constant(np.asarray(1 / stays.mean()))
        made = self._mean(value) if self.node.op_type == OP else self._normalized(value)
        if reader is not self.node:
            made = self._made("Reshape", made, given(reader, 1))
        take_place(self.node.outputs[0], made)
        self.graph.remove(self.node, safe=True)

    def _normalized(self, value: ir.Value) -> ir.Value:
        if FUSED.get(self.node.op_type, True):
            value = self._made("Sub", value, self._mean(value))
        square = self._mean(self._made("Mul", value, value))
        epsilon = self._constant(np.asarray(number(self.node, "epsilon", EPSILON)))
        unit = self._made("Div", value, self._made("Sqrt", self._made("Add", square, epsilon)))
        for op, vector in zip(("Mul", "Add"), self.node.inputs[1:], strict=False):
            unit = unit if vector is None else self._made(op, unit, self._along_channels(vector))
        return unit

    def _along_channels(self, vector: ir.Value) -> ir.Value:
        """Return a vector that goes along the channels: the last axis of rows, the second one of maps."""
        if self.node.op_type in FUSED:
            return vector
        shape = constant(self.graph, np.array([-1, *[1] * (self.rank - 2)]), f"{key(self.node)}/shape")
        return self._made("Reshape", vector, shape)

    def _mean(self, value: ir.Value) -> ir.Value:
        """Return the mean over the positions that stay."""
        mean = mean_over(self.graph, self._made("Mul", value, self.mask), self.axes, self.opset)
        return self._made("Mul", self._placed(mean), self.share)

    def _made(self, op: str, *operands: ir.Value) -> ir.Value:
        return self._placed(ir.Node("", op, operands, num_outputs=1))

    def _placed(self, node: ir.Node) -> ir.Value:
        made = node.outputs[0]
        node.name = made.name = free_name(self.graph, f"{key(self.node)}/{node.op_type}")
        stand_beside(node, self.node)
        self.graph.insert_before(self.node, node)
        return made

    def _constant(self, array: Array) -> ir.Value:
        return constant(self.graph, array.astype(self.dtype), f"{key(self.node)}/left")
