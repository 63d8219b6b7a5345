"""Write decisions into a graph: the only code that changes nodes and weights.

It works on any graph with nodes of the traced model, the whole model or a segment, so streaming calibration and the
final file use the same code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxgrail.core import Array, Bools
from onnxgrail.errors import RewriteError
from onnxgrail.graph import ops  # noqa: F401  registers the rewrites
from onnxgrail.graph.attributes import given
from onnxgrail.graph.ops.rule import find_narrow
from onnxgrail.graph.ops.tensors.cut import Cut, constant
from onnxgrail.graph.rewrite.assign import assign, in_its_place, is_sole, sweep
from onnxgrail.graph.rewrite.computed import fill, give, lay_out, pick
from onnxgrail.graph.rewrite.shift import shift_biases
from onnxgrail.graph.rewrite.stored import Growth, User, cut_stored, follow
from onnxgrail.graph.rewrite.unique import names_kept, renamed
from onnxgrail.graph.trace.facts import captures, constant_of, key
from onnxgrail.graph.trace.sizes import SOURCES
from onnxgrail.graph.trace.survey import Form, Ledger, Operand, Survey


def apply(graph: ir.Graph, survey: Survey, ledger: Ledger) -> None:
    """Narrow a graph in place (shapes, attributes, weights) and remove what has no readers any more.

    Raises:
        RewriteError: a node cannot be narrowed; the caller names the block.
    """
    if not ledger.dead.any() and not ledger.arrays and not ledger.shifts:
        return
    nodes = list(graph)
    with names_kept(graph):
        _narrow(graph, nodes, survey, ledger)
        if ledger.shifts:
            shift_biases(graph, nodes, survey, ledger)


def _narrow(graph: ir.Graph, nodes: list[ir.Node], survey: Survey, ledger: Ledger) -> None:
    replaced: set[ir.Value] = set()
    here = {v.name or "" for node in nodes for v in (*node.inputs, *node.outputs) if v is not None}
    marks = {name: survey.marks[name] for name in here.union(v.name or "" for v in graph.inputs) & survey.marks.keys()}
    narrowed = {name for name, some in marks.items() if any(ledger.dead[m.labels].any() for m in some)}
    for node in sorted(nodes, key=lambda n: n.op_type in SOURCES):  # readers of sizes before the Shape nodes they read
        touched = any(v is not None and v.name in narrowed for v in [*node.inputs, *node.outputs])
        function = find_narrow(node.domain, node.op_type) if touched else None
        if function is not None:
            before = [v for v in node.inputs if v is not None]
            function(Cut(node, survey.facts, survey.marks, ledger.dead, survey.sizes))
            replaced |= {v for v in before if v not in node.inputs}
    replaced |= _weights(graph, nodes, survey, ledger)
    for value in [*graph.inputs, *(v for node in graph for v in node.outputs)]:
        if value.name in narrowed and value.const_value is None:
            _resize(value, survey, ledger.dead)
    sweep(graph, replaced)


def _weights(graph: ir.Graph, nodes: list[ir.Node], survey: Survey, ledger: Ledger) -> set[ir.Value]:
    """Cut every constant operand that loses positions or has new values; shared constants are copied on write."""
    claims: dict[str, list[tuple[ir.Node, int, Operand]]] = {}
    for node in nodes:
        for position in range(len(node.inputs)):
            operand = survey.operands.get((key(node), position))
            if operand is not None and node.inputs[position] is not None and _changes(operand, ledger):
                claims.setdefault(operand.param, []).append((node, position, operand))
    replaced: set[ir.Value] = set()
    growth: Growth = {}
    captured = {name for node in nodes for name in captures(node)}
    forms = {form.operand.param: form for holding in survey.holdings for form in holding.forms}
    for value in dict.fromkeys(given(n, position) for users in claims.values() for n, position, _ in users):
        captured |= _write_sizes(graph, value, survey)  # hold measured sizes: replaced, not changed
    for param, users in claims.items():
        stored = survey.facts.stored.get(users[0][2].value)
        if stored is not None:
            left, grown = cut_stored(graph, stored, users, survey, ledger, captured)
            replaced |= left
            growth |= grown
            continue
        replaced |= _cut(graph, users, forms.get(param), survey, ledger, captured)
    return replaced | follow(graph, nodes, growth, survey, captured)


def _cut(
    graph: ir.Graph,
    users: Sequence[User],
    form: Form | None,
    survey: Survey,
    ledger: Ledger,
    captured: Collection[str],
) -> set[ir.Value]:
    """Cut one constant for the operands of a working array; return the values that these no longer read."""
    first, at, operand = users[0]
    value, places, param = given(first, at), [(node, position) for node, position, _ in users], operand.param
    renewed = param in ledger.arrays
    if form is not None and form.picked and not renewed:
        pick(graph, places, operand, ledger.dead)
        return set()
    producer = value.producer()
    if producer is not None and producer.op_type == "ConstantOfShape" and not renewed:
        shape = operand.left(survey.facts.shapes[operand.value], ledger.dead)
        return fill(graph, places, shape, param, captured)
    array = _original(value, operand, survey, ledger)
    core = form.spread.core(array, ledger.dead) if form is not None and form.spread is not None else None
    if core is not None:
        return lay_out(graph, places, core, param, captured)
    array = operand.narrowed(array, ledger.dead)
    if is_sole(graph, value, places, captured):
        assign(value, array)
        return set()
    return give(places, in_its_place(graph, value, array, renamed(param)))


def _write_sizes(graph: ir.Graph, weight: ir.Value, survey: Survey) -> set[str]:
    """Replace Shape nodes on a weight by constants with the sizes before the cut; return their names."""
    written = set()
    for use in list(weight.uses()):
        name = use.node.outputs[0].name or ""
        if use.node.op_type in SOURCES and name in survey.facts.values and not use.node.outputs[0].is_graph_output():
            fixed = constant(graph, survey.facts.values[name], f"{name}/fixed")
            use.node.outputs[0].replace_all_uses_with(fixed)
            graph.remove(use.node, safe=True)
            written.add(fixed.name or "")
    return written


def _changes(operand: Operand, ledger: Ledger) -> bool:
    return operand.param in ledger.arrays or operand.changes(ledger.dead)


def _original(value: ir.Value, operand: Operand, survey: Survey, ledger: Ledger) -> Array:
    found = ledger.arrays.get(operand.param)
    if found is None:
        found = constant_of(value, operand.value, survey.facts)
    if found is None:
        raise RewriteError(f"the constant {operand.value} has no value")
    return found


def _resize(value: ir.Value, survey: Survey, dead: Bools) -> None:
    """Update recorded shapes, so that no stale value_info is left.

    A narrowed dimension that was symbolic becomes unknown: other tensors may still have the full width under that name,
    and ONNX Runtime reuses buffers by dimension name.
    """
    if value.shape is None:
        return
    dims = list(value.shape.dims)
    for mark in survey.marks[value.name or ""]:
        (axis,) = mark.axes
        if axis < len(dims):
            symbolic = not isinstance(dims[axis], int)
            dims[axis] = ir.SymbolicDim(None) if symbolic else int((~dead[mark.labels]).sum())
    value.shape = ir.Shape(dims)
