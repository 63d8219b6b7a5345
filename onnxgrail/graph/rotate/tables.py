"""Embedding tables: a matrix after the lookup gives their channels a basis of their own, in which the last can go."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.attributes import integer
from onnxgrail.graph.rotate.bridges import bridge
from onnxgrail.graph.rotate.marked import MARK
from onnxgrail.graph.rotate.streams import Stream, Wall, stream_at
from onnxgrail.graph.trace.facts import Facts

ROWS = 4  # rows per channel from which a table may be worth a matrix


def tables_of(model: ir.Model, facts: Facts) -> dict[str, ir.Value]:
    """Return the tables whose channels nothing but a lookup reads: name -> the vectors that are looked up."""
    found = {}
    for node in model.graph:
        table = node.inputs[0] if node.op_type == "Gather" and node.domain == "" else None
        name = (table.name or "") if table is not None else ""
        if table is None or name not in model.graph.initializers or name in facts.stored:
            continue
        shape, looked_up = facts.shapes.get(name, ()), node.outputs[0]
        single = len(table.uses()) == 1 and not table.is_graph_output() and not looked_up.is_graph_output()
        large = len(shape) == 2 and shape[0] >= ROWS * shape[1] and facts.has_floats(name)
        if single and large and integer(node, "axis") == 0 and looked_up.name in facts.shapes and looked_up.uses():
            found[name] = looked_up
    return found


def bridged(model: ir.Model, facts: Facts, name: str, looked_up: ir.Value) -> tuple[Facts, Stream]:
    """Insert a matrix after the lookup in a table; return the facts with it, and the space between the two."""
    axis = len(facts.shapes[looked_up.name or ""]) - 1
    facts = bridge(model.graph, Wall(looked_up, axis, None, None, ahead=False), facts)
    (reader,) = (use.node for use in looked_up.uses())
    reader.metadata_props[MARK] = name
    return facts, stream_at(facts, looked_up, axis, name)
