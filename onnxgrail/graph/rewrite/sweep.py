"""Remove what nothing reads any more after a change."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxgrail.graph.cost.counting import is_weight


def sweep(graph: ir.Graph, replaced: Iterable[ir.Value]) -> None:
    """Remove what only the replaced operands needed; what had no readers before stays.

    A weight that is also a graph input is removed with its input: nothing would read it.
    """
    queue = list(replaced)
    while queue:
        value = queue.pop()
        if value.uses() or value.is_graph_output():
            continue
        node = value.producer()
        if node is None:
            _drop(graph, value)
            continue
        if any(v.uses() or v.is_graph_output() for v in node.outputs) or node.graph is not graph:
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
