"""Key-value caches of heads in another basis: matrices between a cache and the heads, while a model is narrowed.

They keep the interface as it is, so that feeds and outputs fit the model in any basis. The file has none of them: its
caches are in the basis of the heads, and its note tells the basis.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Floats
from onnxgrail.graph.attributes import given, integer, integers, maker_of, name_of, names_of, numbers_of
from onnxgrail.graph.flatten.branches import stand_beside
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.products import is_product
from onnxgrail.graph.rewrite.assign import sweep
from onnxgrail.graph.rewrite.interface import Basis, Port, positional
from onnxgrail.graph.rewrite.unique import free_name, hand_over
from onnxgrail.graph.rotate.marked import CACHED, is_cached
from onnxgrail.graph.trace.facts import Facts, key
from onnxgrail.graph.trace.survey import Survey

RANK = 4  # (batch, heads, length, size) or (batch, length, heads, size)
COPIES = ("Identity", "Cast", "Transpose")
SIZES = ("Shape", "Size")
SHAPING = ("Reshape", "Expand", "Unsqueeze", "Squeeze", "Mul", "Div")  # between a cache and the product that reads it
STEPS = 8  # most of them
KERNELS = ("Attention", "MultiHeadAttention")


@dataclass(frozen=True, slots=True, eq=False)
class _Cache:
    """A cache that a node joins with heads.

    Attributes:
        node: the node; operand: what it joins; made: the joined heads.
        heads: the axis of the heads in both.
        past, present: the input and the output of the model, with the axis of each of the four axes of these tensors.
    """

    node: ir.Node
    operand: int
    made: ir.Value
    heads: int
    past: tuple[ir.Value, list[int]]
    present: tuple[ir.Value, list[int]]


def with_matrices(model: ir.Model, facts: Facts) -> Facts:
    """Put matrices, identities, after each past and before each present of a cache, in place; return the new facts."""
    for cache in list(_caches(model.graph, facts)):
        source = given(cache.node, cache.operand)
        shape, dtype = facts.shapes[cache.made.name or ""], facts.dtypes[cache.made.name or ""]
        found = _between(model.graph, cache, source, facts, cache.past)
        cache.node.replace_input_with(cache.operand, found.last)
        model.graph.insert_before(cache.node, found.nodes)
        found = _between(model.graph, cache, cache.made, found.facts, cache.present)
        model.graph.insert_after(cache.node, found.nodes)
        _hand_on(model.graph, cache, found.last)
        names = [value.name or "" for value in (cache.made, found.last)]
        facts = replace(
            found.facts,
            shapes={**found.facts.shapes, **dict.fromkeys(names, shape)},
            dtypes={**found.facts.dtypes, **dict.fromkeys(names, dtype)},
        )
    return facts


def in_pairs(nodes: Iterable[ir.Node]) -> bool:
    """Return True if of each cache there is the matrix after its past and that before its present, or neither."""
    told = [json.loads(node.metadata_props[CACHED]) for node in nodes if is_cached(node)]
    sides = [{entry["cache"] for entry in told if entry["past"] == past} for past in (True, False)]
    return sides[0] == sides[1]


def without_matrices(model: ir.Model, wanted: Collection[ir.Node] = ()) -> tuple[Port, ...]:
    """Remove matrices between caches and heads, in place, except those wanted; return the ports of narrowed caches."""
    ports, bases = [], dict[str, Floats]()
    for node in [node for node in model.graph if node.op_type == "MatMul" and is_cached(node) and node not in wanted]:
        told = json.loads(node.metadata_props[CACHED])
        if told["past"]:
            bases[told["cache"]] = _matrices(node, told["count"])
        found = bases.get(told["cache"])
        assert found is not None
        _remove(model.graph, node, told, found.shape[2])
        port = Port(
            name=told["name"],
            axis=told["axis"],
            before=found.shape[1],
            after=found.shape[2],
            kept=(),
            basis=Basis(axis=told["heads"], matrices=found),
        )
        ports.append(positional(port, found))
    return tuple(port for port in ports if port.after < port.before or port.basis is not None)


def shown(model: ir.Model, survey: Survey) -> Survey:
    """Return a survey that tells nothing of these matrices, for reports."""
    asides = {name_of(node, 1) for node in model.graph if node.op_type == "MatMul" and is_cached(node)}
    blocks = [replace(b, slots=tuple(s for s in b.slots if s.initializer not in asides)) for b in survey.blocks]
    holdings = [one for one in survey.holdings if asides.isdisjoint(form.operand.value for form in one.forms)]
    refusals = [refusal for refusal in survey.refusals if refusal.value not in asides]
    return replace(survey, blocks=tuple(blocks), holdings=tuple(holdings), refusals=tuple(refusals))


def _caches(graph: ir.Graph, facts: Facts) -> Iterator[_Cache]:
    for node in graph:
        for operand, output in _places(node, facts):
            made = node.outputs[output] if output < len(node.outputs) else None
            past = _past(node.inputs[operand])
            present = None if made is None or past is None else _present(made)
            empty = 0 in facts.shapes.get(name_of(node, operand), (0,))  # tells nothing of what it is joined with
            if made is not None and past is not None and present is not None and not empty:
                heads = 1 if node.op_type == "Attention" else 3 - integer(node, "axis") % RANK
                yield _Cache(node, operand, made, heads, past, present)


def _places(node: ir.Node, facts: Facts) -> list[tuple[int, int]]:
    """Return the operands of a node that may be a past, with the output that is the present."""
    if node.domain:
        return []
    if node.op_type == "Attention":
        return [(k, output) for k, output in ((4, 1), (5, 2)) if k < len(node.inputs) and node.inputs[k] is not None]
    joins = node.op_type == "Concat" and len(node.inputs) > 1 and facts.has_floats(key(node))
    if not joins or len(facts.shapes[key(node)]) != RANK or integer(node, "axis") % RANK not in (1, 2):
        return []
    return [(0, 0)] if _is_attended(node.outputs[0], facts) else []


def _is_attended(value: ir.Value, facts: Facts) -> bool:
    """Return True if attention reads a value, a kernel or a product with another activation, and no layer before."""
    values = [value]
    for _ in range(STEPS):
        readers = list(dict.fromkeys(use.node for one in values for use in one.uses()))
        products = [node for node in readers if is_product(node) or node.op_type in KERNELS]
        if any(facts.constants.isdisjoint(names_of(node.inputs)[:2]) for node in products):
            return True
        values = [node.outputs[0] for node in readers if node.op_type in (*COPIES, *SHAPING)]
    return False


def _past(value: ir.Value | None) -> tuple[ir.Value, list[int]] | None:
    """Return the model input that a value copies, and its axes; None if it is computed, or has other readers."""
    axes = [*range(RANK)]
    while value is not None:
        if len([use for use in value.uses() if use.node.op_type not in SIZES]) != 1 or value.is_graph_output():
            return None
        node = value.producer()
        if node is None:
            return (value, axes) if value.is_graph_input() and value.const_value is None else None
        if not _copies(node):
            return None
        axes = _through(node, axes)
        value = node.inputs[0]
    return None


def _copies(node: ir.Node) -> bool:
    """Return True if a node copies its input, as a concatenation of one tensor does."""
    alone = node.op_type == "Concat" and len(node.inputs) == 1
    return not node.domain and (node.op_type in COPIES or alone)


def _through(node: ir.Node, axes: list[int]) -> list[int]:
    """Return the axes of what a copy reads for axes of what it makes."""
    order = integers(node, "perm", tuple(reversed(range(RANK)))) if node.op_type == "Transpose" else range(RANK)
    return [order[axis] for axis in axes]


def _present(value: ir.Value) -> tuple[ir.Value, list[int]] | None:
    """Return the model output that copies a value, and its axes; None if there is none, or are several."""
    if value.is_graph_output():
        return value, [*range(RANK)]
    copies = [use.node for use in value.uses() if _copies(use.node) and use.node.outputs[0].is_graph_output()]
    if len(copies) != 1 or copies[0].outputs[0].uses():
        return None
    axes = _through(copies[0], [*range(RANK)])
    return copies[0].outputs[0], [axes.index(axis) for axis in range(RANK)]


@dataclass(frozen=True, slots=True, eq=False)
class _Between:
    """New nodes between a cache and heads, the last value, and the facts with all values."""

    nodes: list[ir.Node]
    last: ir.Value
    facts: Facts


def _between(
    graph: ir.Graph, cache: _Cache, value: ir.Value, facts: Facts, port: tuple[ir.Value, list[int]]
) -> _Between:
    """Make nodes that multiply the channels of all heads, side by side, by one matrix."""
    name, shape = port[0].name or "", facts.shapes[value.name or ""]
    batch, length = shape[0], shape[3 - cache.heads]
    count, size = shape[cache.heads], shape[3]
    dtype = facts.dtypes[value.name or ""]
    numbers = {
        "basis": np.eye(count * size).astype(dtype),
        "flat": np.array([0, 0, count * size]),
        "apart": np.array([0, 0, count, size]),
    }
    held = {hint: constant(graph, array, f"{name}/{hint}") for hint, array in numbers.items()}
    steps: list[tuple[str, list[str], tuple[int, ...]]] = [
        ("Reshape", ["flat"], (batch, length, count * size)),
        ("MatMul", ["basis"], (batch, length, count * size)),
        ("Reshape", ["apart"], (batch, length, count, size)),
    ]
    if cache.heads == 1:
        steps = [("Transpose", [], (batch, length, count, size)), *steps, ("Transpose", [], shape)]
    told = {
        "name": name,
        "axis": port[1][3],
        "heads": port[1][cache.heads],
        "count": count,
        "cache": f"{key(cache.node)}/{cache.operand}",
        "past": port is cache.past,
    }
    nodes, last, shapes = [], value, {}
    for op, hints, made in steps:
        attributes = [ir.AttrInt64s("perm", [0, 2, 1, 3])] if op == "Transpose" else []
        label = free_name(graph, f"{name}/{op}")
        node = ir.Node("", op, [last, *(held[hint] for hint in hints)], attributes, num_outputs=1, name=label)
        node.metadata_props[CACHED] = json.dumps(told)
        stand_beside(node, cache.node)
        last = node.outputs[0]
        last.name, last.type = label, value.type
        shapes[label] = made
        nodes.append(node)
    return _Between(nodes, last, _known(facts, shapes, dtype, {held[hint]: numbers[hint] for hint in numbers}))


def _known(facts: Facts, shapes: dict[str, tuple[int, ...]], dtype: np.dtype, held: dict[ir.Value, Array]) -> Facts:
    constants = {value.name or "": array for value, array in held.items()}
    sizes = {name: array for name, array in constants.items() if array.dtype.kind == "i"}
    return replace(
        facts,
        shapes={**facts.shapes, **shapes, **{name: array.shape for name, array in constants.items()}},
        dtypes={**facts.dtypes, **dict.fromkeys(shapes, dtype), **{name: a.dtype for name, a in constants.items()}},
        values={**facts.values, **sizes},
        constants=facts.constants | constants.keys(),
    )


def _hand_on(graph: ir.Graph, cache: _Cache, last: ir.Value) -> None:
    """Let the output of the model be, or copy, the last value."""
    output = cache.present[0]
    if output is cache.made:
        last.shape = output.shape
        hand_over(graph, output, last)
        return
    copy = output.producer()
    assert copy is not None
    copy.replace_input_with(0, last)


def _matrices(node: ir.Node, count: int) -> Floats:
    """Return the (heads, before, after) matrices on the diagonal of the matrix that a past is multiplied by."""
    numbers = numbers_of(given(node, 1)).astype(np.float64)
    rows, columns = numbers.shape
    apart = numbers.reshape(count, rows // count, count, columns // count)
    return np.ascontiguousarray(apart[np.arange(count), :, np.arange(count)])


def _remove(graph: ir.Graph, node: ir.Node, told: dict[str, int | str | bool], width: int) -> None:
    """Remove the nodes around a matrix; the input or output of the model gets the channels of the heads."""
    first, last = node, node
    while (before := maker_of(first, 0)) and is_cached(before):
        first = before
    while not last.outputs[0].is_graph_output() and is_cached(reader := next(iter(last.outputs[0].uses())).node):
        last = reader
    source, end = given(first, 0), last.outputs[0]
    if end.is_graph_output():
        graph.outputs[[*graph.outputs].index(end)] = source
        end.name, source.name = None, end.name
    end.replace_all_uses_with(source)
    sweep(graph, [end])
    for value in (*graph.inputs, *graph.outputs):
        if value.name == told["name"] and value.shape is not None:
            dims = list(value.shape.dims)
            dims[int(told["axis"])] = width
            value.shape = ir.Shape(dims)
    while (copy := source.producer()) is not None and _copies(copy) and told["past"]:
        source.shape = None  # it was recorded for all channels
        source = given(copy, 0)
