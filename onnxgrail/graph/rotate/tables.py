"""Embedding tables: a matrix after the lookup gives their channels a basis of their own, in which the last can go."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.fittable.tables import tables
from onnxgrail.graph.rotate.bridges import bridge
from onnxgrail.graph.rotate.marked import MARK
from onnxgrail.graph.rotate.streams import Stream, Wall, stream_at
from onnxgrail.graph.trace.facts import Facts

ROWS = 4  # rows per channel from which a table may be worth a matrix


def tables_of(model: ir.Model, facts: Facts) -> dict[str, ir.Value]:
    """Return the tables whose channels nothing but a lookup reads: name -> the vectors that are looked up."""
    found = {}
    for table in tables(model):
        node, name = table.lookups[0], table.weight
        direct = len(table.lookups) == 1 and not table.products and node.inputs[0] is model.graph.initializers[name]
        shape, looked_up = facts.shapes.get(name, ()), node.outputs[0]
        large = len(shape) == 2 and shape[0] >= ROWS * shape[1]
        if direct and large and looked_up.name in facts.shapes and looked_up.uses() and not looked_up.is_graph_output():
            found[name] = looked_up
    return found


def bridged(model: ir.Model, facts: Facts, name: str, looked_up: ir.Value) -> tuple[Facts, Stream]:
    """Insert a matrix after the lookup in a table; return the facts with it, and the space between the two."""
    axis = len(facts.shapes[looked_up.name or ""]) - 1
    facts = bridge(model.graph, Wall(looked_up, axis, None, None, ahead=False), facts)
    (reader,) = (use.node for use in looked_up.uses())
    reader.metadata_props[MARK] = name
    return facts, stream_at(facts, looked_up, axis, name)
