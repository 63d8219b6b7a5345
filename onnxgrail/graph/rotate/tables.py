"""Embedding tables: matrices after lookups and before a tied head give their channels a basis of their own."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrail.graph.attributes import MICROSOFT
from onnxgrail.graph.fittable.tables import Table, tables
from onnxgrail.graph.rotate.bridges import bridge
from onnxgrail.graph.rotate.layers import Slot
from onnxgrail.graph.rotate.marked import MARK, TURNED
from onnxgrail.graph.rotate.streams import Stream, Wall
from onnxgrail.graph.trace.facts import Facts

ROWS = 4  # rows per channel from which a table may be worth a matrix
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
        stream.measured.append(value.name or "")
        axis = len(facts.shapes[value.name or ""]) - 1
        facts = bridge(graph, Wall(value, axis, None, head, ahead=head is not None), facts)
        if head is None:
            (reader,) = (use.node for use in value.uses())
            reader.metadata_props[MARK] = name
            stream.slots.append(Slot(node=reader, operand=1, axis=0, reads=True))
        else:
            fresh = head.inputs[0]
            writer = fresh.producer() if fresh is not None else None
            assert writer is not None
            stream.slots.append(Slot(node=writer, operand=1, axis=1))
    return facts, stream


def _read_directly(model: ir.Model, head: ir.Node, table: ir.Value) -> None:
    """Let a head read the table itself, not its transpose: then all that reads the table is narrowed with it."""
    turned = head.inputs[1]
    maker = turned.producer() if turned is not None else None
    if turned is table or maker is None:
        return
    if head.op_type == "MatMul":
        head.op_type, head.domain = "FusedMatMul", MICROSOFT
        head.metadata_props[TURNED] = ""
        model.opset_imports.setdefault(MICROSOFT, 1)
    head.attributes["transB"] = ir.AttrInt64("transB", 1)
    head.replace_input_with(1, table)
    if not maker.outputs[0].uses():
        model.graph.remove(maker, safe=True)
