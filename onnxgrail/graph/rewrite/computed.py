"""Cut constants that are computed from smaller ones, without storing larger ones than the file had."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Bools, Ints
from onnxgrail.graph.attributes import given
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.assign import Place, assign, is_sole, own_node, set_operands
from onnxgrail.graph.rewrite.unique import free_name, renamed
from onnxgrail.graph.stored.spread import Core
from onnxgrail.graph.trace.survey import Operand

REPEATS = ("Expand", "Tile")


def lay_out(
    graph: ir.Graph, places: Sequence[Place], core: Core, param: str, captured: Collection[str]
) -> set[ir.Value]:
    """Replace operands by a constant that repeats a core.

    If a node repeats it already, the node's source and target shape are narrowed in place.

    Args:
        graph: changed in place.
        places: the operands, as (node, input position).
        core: the stored numbers and their layout.
        param: working array, for the names of new constants.
        captured: names that bodies of nodes read.

    Returns:
        Values that may no longer have readers.
    """
    (value, *others) = dict.fromkeys(node.inputs[position] for node, position in places)
    assert value is not None
    producer = value.producer()
    if producer is None or producer.op_type not in REPEATS or others or len(core.expanded) != len(core.shape):
        return give(places, _repeated(graph, places[0][0], core, renamed(param)))
    holder = own_node(graph, value, places)
    before = {v for v in holder.inputs if v is not None}
    expanded = np.array(core.expanded, dtype=np.int64)
    sizes = expanded if producer.op_type == "Expand" else expanded // np.array(core.array.shape, dtype=np.int64)
    replaced = set_operands(graph, [(holder, 0)], core.array, captured)
    _resize(graph, holder, 1, sizes, param, captured)
    _declare(holder, core.shape)
    return replaced | before | {value}


def _repeated(graph: ir.Graph, reader: ir.Node, core: Core, name: str) -> ir.Value:
    """Store a core and expand it before the first node that reads it."""
    found = constant(graph, core.array, name)
    if core.expanded != core.array.shape:
        found = _node(graph, reader, "Expand", [found, _sizes(graph, core.expanded, f"{name}/to")], f"{name}/expanded")
    if core.shape != core.expanded:
        found = _node(graph, reader, "Reshape", [found, _sizes(graph, core.shape, f"{name}/shape")], f"{name}/shaped")
    return found


def pick(graph: ir.Graph, places: Sequence[Place], operand: Operand, dead: Bools) -> None:
    """Gather the kept positions from a constant, if a narrowed copy would be larger than the constant's stored form.

    Args:
        graph: changed in place.
        places: the operands, as (node, input position).
        operand: the unit numbers along the constant's axes.
        dead: (ids,) mask of removed units.
    """
    reader, position = places[0]
    value = given(reader, position)
    for axis, units in operand.units.items():
        if dead[units].any():
            stays = constant(graph, np.flatnonzero(~dead[units]), f"{operand.param}/kept{axis}")
            along = [ir.AttrInt64("axis", axis)]
            value = _node(graph, reader, "Gather", [value, stays], f"{operand.param}/picked{axis}", along)
    give(places, value)


def fill(
    graph: ir.Graph, places: Sequence[Place], shape: Sequence[int], param: str, captured: Collection[str]
) -> set[ir.Value]:
    """Narrow a weight that is stored as one number and a shape.

    Args:
        graph: changed in place.
        places: the operands, as (node, input position).
        shape: the narrowed shape.
        param: working array, for the names of new constants.
        captured: names that bodies of nodes read.

    Returns:
        Values that may no longer have readers.
    """
    value = given(*places[0])
    holder = own_node(graph, value, places)
    before = {v for v in holder.inputs if v is not None}
    _resize(graph, holder, 0, np.array(shape, dtype=np.int64), param, captured)
    _declare(holder, shape)
    return {value} | before


def _resize(graph: ir.Graph, node: ir.Node, operand: int, sizes: Ints, param: str, captured: Collection[str]) -> None:
    """Write a shape: in place if only this node reads the old one, else as a new constant."""
    old = given(node, operand)
    if is_sole(graph, old, [(node, operand)], captured):
        assign(old, sizes)
    else:
        node.replace_input_with(operand, constant(graph, sizes, f"{param}/shape"))


def give(places: Sequence[Place], fresh: ir.Value) -> set[ir.Value]:
    """Make operands read another value; return the values that they read before."""
    replaced = {v for node, position in places if (v := node.inputs[position]) is not None}
    for node, position in places:
        node.replace_input_with(position, fresh)
    return replaced


def _declare(node: ir.Node, shape: Sequence[int]) -> None:
    """Update the recorded shape of a node's output."""
    if node.outputs[0].shape is not None:
        node.outputs[0].shape = ir.Shape(shape)


def _sizes(graph: ir.Graph, sizes: Sequence[int], name: str) -> ir.Value:
    return constant(graph, np.array(sizes, dtype=np.int64), name)


def _node(
    graph: ir.Graph, reader: ir.Node, op: str, inputs: Sequence[ir.Value], name: str, attributes: Sequence[ir.Attr] = ()
) -> ir.Value:
    name = free_name(graph, name)
    node = ir.Node("", op, list(inputs), list(attributes), num_outputs=1, name=name)
    node.outputs[0].name = name
    graph.insert_before(reader, node)
    return node.outputs[0]
