"""Cut a runnable piece between named tensors out of a graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.graph.rotate.marked import marks_of
from onnxgrail.graph.trace.facts import Facts, captures

COUNTING = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression"})  # as many results as there are hits
SIZED = frozenset({"Shape", "Size"})  # of known length, whatever they measure
WRITES = frozenset({"ScatterND", "ScatterElements", "Scatter"})  # as large as their first input


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """Facts on a graph that many cuts need.

    Attributes:
        values: by name.
        order: of the nodes.
        counted: names of values whose size depends on the numbers in the inputs.
    """

    values: Mapping[str, ir.Value]
    order: Mapping[ir.Node, int]
    counted: Collection[str]

    def span(self, names: Iterable[str]) -> tuple[int, int]:
        """Return the positions of the first and the last node that computes one of these values, 0 for inputs."""
        makers = [self.values[name].producer() if name in self.values else None for name in names]
        places = [0 if node is None else self.order[node] for node in makers]
        return min(places, default=0), max(places, default=0)


def index_of(graph: ir.Graph) -> Index:
    """Return the index of a graph that will not change."""
    values = {**graph.initializers, **{v.name: v for v in graph.inputs if v.name}}
    values |= {v.name: v for node in graph for v in node.outputs if v.name}
    return Index(values, {node: number for number, node in enumerate(graph)}, _counted(graph))


def _counted(graph: ir.Graph) -> set[str]:
    """Return the names of values with a size that depends on how many numbers an operator finds (routed tokens)."""
    found: set[str] = set()
    for node in graph:
        operands = node.inputs[:1] if node.op_type in WRITES else () if node.op_type in SIZED else node.inputs
        if node.op_type in COUNTING or any(value is not None and value.name in found for value in operands):
            found.update(value.name for value in node.outputs if value.name)
    return found


def cut(
    model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], facts: Facts, index: Index | None = None
) -> ir.Model:
    """Build a model that computes `outputs` from `inputs`; it shares the weights, and its nodes are copies.

    Takes time proportional to the piece if an `index` of the graph is given.  An input that the piece must compute
    anyway (one output of a Split of which another output is needed) is not among its inputs.

    Raises:
        ValueError: the inputs do not determine the outputs.
    """
    index = index or index_of(model.graph)
    nodes, weights = _between(inputs, outputs, index)
    starts, ends = ([index.values[name] for name in names] for names in (inputs, outputs))
    starts = [value for value in starts if value.producer() not in nodes]  # computed by the piece, see above
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
        marks = marks_of(node)
        node.metadata_props.clear()  # stack traces of the exporter are longer than the graph
        node.metadata_props.update(marks)
    for value in [*graph.inputs, *graph.outputs]:
        name = value.name or ""
        if name in facts.shapes:  # the runtime needs an element type; sizes stay unknown
            value.type = ir.TensorType(ir.DataType.from_numpy(facts.dtypes[name]))
            value.shape = ir.Shape(_declared(name, facts, index))
    piece = ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))
    graph.opset_imports.update(model.opset_imports)
    return piece


def _declared(name: str, facts: Facts, index: Index) -> list[int | None]:
    """Leave sizes unknown, except the length of a target shape: the runtime infers ranks from it."""
    shape, value = facts.shapes[name], index.values[name]
    opened = value.is_graph_input() and (value.shape is None or not value.shape.is_static())
    fixed = name in facts.values and not opened and name not in facts.varying and name not in index.counted
    if len(shape) == 1 and facts.dtypes[name].kind in "iu" and fixed:
        return list(shape)
    return [None] * len(shape)


def _between(inputs: Sequence[str], outputs: Sequence[str], index: Index) -> tuple[dict[ir.Node, None], list[ir.Value]]:
    """Return the nodes between inputs and outputs, and the weights that they read."""
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
        fresh = sorted((read - given - seen) & index.values.keys())  # intersect last: the index is long
        seen.update(fresh)
        queue += fresh
    known = [index.values[name] for name in inputs if index.values[name].is_initializer()]
    return nodes, [*known, *weights.values()]
