"""Cut a runnable piece out of a graph between named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.graph.trace.facts import Facts, captures


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """Values and nodes of a graph by name and by order, made once for many cuts."""

    values: Mapping[str, ir.Value]
    order: Mapping[ir.Node, int]


def index_of(graph: ir.Graph) -> Index:
    """The index of a graph that no longer changes."""
    values = {**graph.initializers, **{v.name: v for v in graph.inputs if v.name}}
    values |= {v.name: v for node in graph for v in node.outputs if v.name}
    return Index(values, {node: number for number, node in enumerate(graph)})


def cut(
    model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], facts: Facts, index: Index | None = None
) -> ir.Model:
    """A new model that computes `outputs` from `inputs`; weights are shared with the old one, nodes are copies.

    Takes time in proportion to the piece, where an `index` of the graph is given.  Inputs that the piece makes itself,
    beside something that it needs, are not among its inputs.

    Raises:
        ValueError: the inputs do not determine the outputs.
    """
    index = index or index_of(model.graph)
    nodes, weights = _between(inputs, outputs, index)
    starts, ends = ([index.values[name] for name in names] for names in (inputs, outputs))
    starts = [value for value in starts if value.producer() not in nodes]  # one part of a Split where another is needed
    view = ir.GraphView(
        starts,
        ends,
        nodes=sorted(nodes, key=index.order.__getitem__),
        initializers=weights,
        opset_imports=model.graph.opset_imports,
        name=model.graph.name,
    )
    graph = view.clone()
    for node in graph:
        node.metadata_props.clear()  # stack traces of the exporter are longer than the graph
    for value in [*graph.inputs, *graph.outputs]:
        name = value.name or ""
        if name in facts.shapes:  # the runtime wants an element type; sizes stay open
            value.type = ir.TensorType(ir.DataType.from_numpy(facts.dtypes[name]))
            value.shape = ir.Shape(_declared(name, facts))
    piece = ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
    graph.opset_imports.update(model.opset_imports)
    return piece


def _declared(name: str, facts: Facts) -> list[int | None]:
    """Sizes stay open, except how many numbers a target shape has: the runtime infers ranks from that."""
    shape = facts.shapes[name]
    if len(shape) == 1 and facts.dtypes[name].kind in "iu" and name in facts.values and name not in facts.varying:
        return list(shape)
    return [None] * len(shape)


def _between(inputs: Sequence[str], outputs: Sequence[str], index: Index) -> tuple[dict[ir.Node, None], list[ir.Value]]:
    """Nodes that lead from the inputs to the outputs, and the weights that they read."""
    nodes: dict[ir.Node, None] = {}
    weights: dict[str, ir.Value] = {}
    given = set(inputs)
    queue = [name for name in outputs if name not in given]
    seen = set(queue)
    while queue:
        name = queue.pop()
        value = index.values[name]
        node = value.producer()
        if node is None:
            if not value.is_initializer():
                raise ValueError(f"{', '.join(outputs)} also need {name}")
            weights[name] = value
            continue
        nodes[node] = None
        read = {v.name for v in node.inputs if v is not None and v.name} | captures(node)
        fresh = sorted((read - given - seen) & index.values.keys())  # in this order: the index is long
        seen.update(fresh)
        queue += fresh
    known = [index.values[name] for name in inputs if index.values[name].is_initializer()]
    return nodes, [*known, *weights.values()]
