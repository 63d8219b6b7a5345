"""Weights that become a product of two, whose channels between them have a basis of their own.

Embedding tables get a matrix after every lookup and before a tied head, convolutions one of a single tap before or
after them: a pair of low rank (Denton et al. 2014, arXiv 1404.0736; Zhang et al. 2015, arXiv 1505.06798).
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnxgrail.graph.attributes import MICROSOFT, given, integers, maker_of, name_of
from onnxgrail.graph.fittable.matrices import Table, tables
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import free_name, name_before
from onnxgrail.graph.rotate.bridges import bridge, follow, with_layer
from onnxgrail.graph.rotate.heads import Inside, Part
from onnxgrail.graph.rotate.layers import Slot, weight_of
from onnxgrail.graph.rotate.marked import MARK, SECOND, TURNED
from onnxgrail.graph.rotate.streams import Stream, Wall
from onnxgrail.graph.trace.facts import Facts, key

ROWS = 4  # rows per channel from which a table may be worth a matrix, or the taps and channels of a convolution
CHANNELS = 32  # least channels between the two parts of a convolution: narrower ones cost more time than they save
READERS = ("Gather", "Transpose", "MatMul", "Gemm", "FusedMatMul")


def tables_of(model: ir.Model, facts: Facts) -> dict[str, Table]:
    """Return the tables whose channels nothing but lookups and tied heads read, by name."""
    return {table.weight: table for table in tables(model) if _fits(table, model.graph, facts)}


def _fits(table: Table, graph: ir.Graph, facts: Facts) -> bool:
    shape = facts.shapes.get(table.weight, ())
    if len(shape) != 2 or shape[0] < ROWS * shape[1]:
        return False
    if any(use.node.op_type not in READERS for use in graph.initializers[table.weight].uses()):
        return False
    looked_up = [node.outputs[0] for node in table.lookups]
    measured = [*looked_up, *(node.inputs[0] for node in table.products)]
    if facts.dtypes[table.weight] == np.float64:  # ONNX Runtime has no kernel for its product with a transposed table
        return False
    known = all(value is not None and facts.has_floats(value.name or "") for value in measured)
    return known and all(value.uses() and not value.is_graph_output() for value in looked_up)


def bridged(model: ir.Model, facts: Facts, table: Table) -> tuple[Facts, Stream]:
    """Insert a matrix after every lookup and before every tied head; return the facts, and the space of the table."""
    graph, name = model.graph, table.weight
    for product in table.products:
        _read_directly(model, product, graph.initializers[name])
    first, *more = [(use.node, use.idx) for use in graph.initializers[name].uses()]
    stream = Stream(name, facts.shapes[name][1])
    stream.slots.append(Slot(node=first[0], operand=first[1], axis=1, also=tuple(more)))
    ends: list[tuple[ir.Value | None, ir.Node | None]] = [(node.outputs[0], None) for node in table.lookups]
    ends += [(node.inputs[0], node) for node in table.products]
    for value, head in ends:
        assert value is not None
        axis = len(facts.shapes[value.name or ""]) - 1
        stream.measured.append((value, axis))
        facts = bridge(graph, Wall(value, axis, None, head, ahead=head is not None), facts, name)
        if head is None:
            (reader,) = (use.node for use in value.uses())
            reader.metadata_props[MARK] = name
            stream.slots.append(Slot(node=reader, operand=1, axis=0, reads=True))
        else:
            writer = maker_of(head, 0)
            assert writer is not None
            stream.slots.append(Slot(node=writer, operand=1, axis=1))
    return facts, stream


def _read_directly(model: ir.Model, head: ir.Node, table: ir.Value) -> None:
    """Let a head read the table itself, not its transpose: then all that reads the table is narrowed with it."""
    maker = maker_of(head, 1)
    if head.inputs[1] is table or maker is None:
        return
    if head.op_type == "MatMul":
        head.op_type, head.domain = "FusedMatMul", MICROSOFT
        head.metadata_props[TURNED] = ""
        model.opset_imports.setdefault(MICROSOFT, 1)
    head.attributes["transB"] = ir.AttrInt64("transB", 1)
    head.replace_input_with(1, table)
    if not maker.outputs[0].uses():
        model.graph.remove(maker, safe=True)


def convolutions(model: ir.Model, facts: Facts) -> list[ir.Node]:
    """Return the convolutions of several taps that a second one of a single tap can make cheaper."""
    return [node for node in model.graph if node.op_type == "Conv" and _is_divisible(node, facts)]


def _is_divisible(conv: ir.Node, facts: Facts) -> bool:
    weight, source = weight_of(conv, facts), conv.inputs[0]
    if weight is None or len(list(weight.uses())) > 1 or source is None:
        return False
    known = facts.has_floats(source.name or "") and facts.has_floats(key(conv)) and source.name not in facts.constants
    shape = facts.shapes[weight.name or ""]
    return known and math.prod(shape[2:]) > 1 and min(_between(conv, shape)) >= CHANNELS and _cheap(conv, shape)


def _cheap(conv: ir.Node, shape: tuple[int, ...]) -> bool:
    width, other = _between(conv, shape)
    return ROWS * width <= math.prod(shape[2:]) * other


def _between(conv: ir.Node, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of channels between the parts of a convolution, and that of its other side."""
    made, read = shape[:2]
    return (read, made) if _goes_first(conv, shape) else (made, read)


def _goes_first(conv: ir.Node, shape: tuple[int, ...]) -> bool:
    """Return True if the part of one tap comes first: it then reads each position once, so none may be skipped."""
    return shape[1] <= shape[0] and set(integers(conv, "strides", (1,))) == {1}


def divided(model: ir.Model, facts: Facts, conv: ir.Node) -> tuple[Facts, Inside]:
    """Insert a convolution of one tap that changes nothing before or after another one, where the channels are fewer.

    Returns:
        The facts, and the channels between the two.
    """
    graph, name = model.graph, name_of(conv, 1)
    source, made, shape = given(conv, 0), conv.outputs[0], facts.shapes[name]
    first, (width, _) = _goes_first(conv, shape), _between(conv, shape)
    value = source if first else made
    sizes, dtype = facts.shapes[value.name or ""], facts.dtypes[name]
    numbers = np.eye(width, dtype=dtype).reshape(width, width, *[1] * len(shape[2:]))
    eye = constant(graph, numbers, f"{name}{SECOND}")
    bias = [] if first else list(conv.inputs[2:])
    path = conv.name or key(conv)
    label = free_name(graph, f"{path}_rank" if "/" in path.strip("/") else f"{path}/rank")  # in the scope of the other
    node = ir.Node("", "Conv", [value, eye, *bias], num_outputs=1, name=label)
    node.metadata_props.update(conv.metadata_props)  # blocks are named by the modules of their nodes
    if first:
        follow(graph, node, value, [conv])
    else:
        conv.resize_inputs(2)
        follow(graph, node, value, [use.node for use in value.uses() if use.node is not node], output=True)
    makes, reads = (node, conv) if first else (conv, node)
    index = np.arange(width)[None, None]
    parts = [
        Part(node=one, operand=1, axes=(axis,), index=index, inverse=one is reads, source=(name_before(value), 1))
        for one, axis in ((makes, 0), (reads, 1))
    ]
    inside = Inside(name=name, kind="rank", node=reads, groups=1, width=width, parts=tuple(parts))
    return with_layer(facts, (value, *node.outputs), sizes, eye, numbers), inside
