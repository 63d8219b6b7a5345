"""Write new numbers for constants, in place or as a copy if others read them, and remove what nothing reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.errors import RewriteError
from onnxgrail.graph.attributes import given, is_read
from onnxgrail.graph.cost.counting import is_weight
from onnxgrail.graph.io.mapped import like
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import free_name, renamed
from onnxgrail.graph.trace.facts import half_of

Place = tuple[ir.Node, int]


def is_sole(graph: ir.Graph, value: ir.Value, places: Sequence[Place], captured: Collection[str]) -> bool:
    """Return True if these operands are the only readers of an initializer, so that it can be changed in place.

    Args:
        graph: the graph.
        value: the initializer.
        places: operands, as (node, input position).
        captured: names that bodies of nodes read.
    """
    if value.name not in graph.initializers or value.is_graph_output() or value.name in captured:
        return False
    mine = set(places)
    return all((use.node, use.idx) in mine for use in value.uses()) and all(
        node.inputs[position] is value for node, position in mine
    )


def assign(value: ir.Value, array: Array) -> None:
    """Set new numbers for an initializer, which keeps its name, documentation and metadata."""
    old = value.const_value
    assert old is not None
    new = ir.Tensor(
        array, old.dtype, name=value.name, doc_string=old.doc_string, metadata_props=dict(old.metadata_props)
    )
    value.const_value = like(old, new)
    value.shape = ir.Shape(array.shape)


def set_operands(graph: ir.Graph, places: Sequence[Place], array: Array, captured: Collection[str]) -> set[ir.Value]:
    """Set new numbers for operands that read one constant.

    Args:
        graph: changed in place.
        places: the operands, as (node, input position).
        array: the new numbers.
        captured: names that bodies of nodes read.

    Returns:
        The values that the operands no longer read: empty if the constant was changed in place.
    """
    value = given(*places[0])
    if value.const_value is not None and _same(value.const_value.numpy(), array):
        return set()
    if is_sole(graph, value, places, captured):
        assign(value, array)
        return set()
    fresh = in_its_place(graph, value, array, renamed(value.name or ""))
    for node, position in places:
        node.replace_input_with(position, fresh)
    return {value}


def in_its_place(graph: ir.Graph, value: ir.Value, array: Array, name: str) -> ir.Value:
    """Create a constant that takes the place of another one, in half precision before a cast if that one is stored so.

    Numbers that half precision cannot hold stay in float32.

    Args:
        graph: changed in place.
        value: the other constant.
        array: the new numbers.
        name: the preferred name.
    """
    half, last = half_of(value), value.producer()
    if half is None or half.const_value is None or last is None:
        return constant(graph, array, name, old=value)
    with np.errstate(over="ignore"):
        numbers = array.astype(half.const_value.dtype.numpy())
    if not np.isfinite(numbers.astype(np.float32)).all():
        return constant(graph, array, name, old=value)
    stored = constant(graph, numbers, renamed(half.name or ""), old=half)
    to = ir.AttrInt64("to", int(ir.DataType.FLOAT))
    node = ir.Node("", "Cast", [stored], [to], num_outputs=1, name=free_name(graph, name))
    fresh = node.outputs[0]
    fresh.name, fresh.type, fresh.shape = free_name(graph, name), value.type, ir.Shape(array.shape)
    graph.insert_after(last, node)
    return fresh


def own_node(graph: ir.Graph, value: ir.Value, places: Sequence[Place]) -> ir.Node:
    """Return the node that computes a value, or a copy of it if other operands than these read the value.

    Args:
        graph: changed in place.
        value: the value.
        places: operands that read it, as (node, input position).

    Raises:
        RewriteError: no node computes the value.
    """
    holder = value.producer()
    if holder is None:
        raise RewriteError(f"no node makes {value.name}")
    mine = set(places)
    if not value.is_graph_output() and all((use.node, use.idx) in mine for use in value.uses()):
        return holder
    name = free_name(graph, renamed(value.name or ""))
    copy = ir.Node(holder.domain, holder.op_type, list(holder.inputs), list(holder.attributes.values()), name=name)
    copy.outputs[0].name = name
    copy.outputs[0].type, copy.outputs[0].shape = value.type, value.shape
    graph.insert_after(holder, copy)
    for node, position in places:
        node.replace_input_with(position, copy.outputs[0])
    return copy


def _same(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)


def sweep(graph: ir.Graph, replaced: Iterable[ir.Value]) -> None:
    """Remove what only the replaced operands needed; what had no readers before stays.

    A weight that is also a graph input is removed with its input: nothing would read it.
    """
    queue = list(replaced)
    while queue:
        value = queue.pop()
        if is_read(value):
            continue
        node = value.producer()
        if node is None:
            _drop(graph, value)
            continue
        if any(map(is_read, node.outputs)) or node.graph is not graph:
            continue
        queue += [v for v in node.inputs if v is not None]
        graph.remove(node, safe=True)


def _drop(graph: ir.Graph, value: ir.Value) -> None:
    """Remove an initializer; a size that is also a graph input stays, since it takes no space."""
    if not value.name or value.name not in graph.initializers:
        return
    if value.is_graph_input():
        if value.dtype is None or not is_weight(value.dtype):
            return
        graph.inputs.remove(value)
    del graph.initializers[value.name]
