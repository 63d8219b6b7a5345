"""Write plain operators for fused ones, so that streams and channels inside heads can be followed.

ONNX Runtime fuses residual sums into normalizations, and moved axes into products; Einsum is a product with moved axes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.graph.attributes import MICROSOFT, given, integer, names_of, number, text
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.products import FUSED as PRODUCTS
from onnxgrail.graph.products import Orders, letters_of, orders_of
from onnxgrail.graph.rewrite.unique import free_name
from onnxgrail.graph.rotate.marked import PLAIN
from onnxgrail.graph.trace.facts import Facts

FUSED = {"SkipLayerNormalization": "LayerNormalization", "SkipSimplifiedLayerNormalization": PLAIN}
EPSILON = 1e-12  # the default of both
LAYER_NORM = 17  # first opset with LayerNormalization
MOVED = ("transBatchA", "transBatchB")  # attributes of fused products, for each operand

_Known = tuple[dict[str, tuple[int, ...]], dict[str, np.dtype[Any]]]
"""Shapes and types of values, to which those of new ones are added."""


def separate(model: ir.Model, facts: Facts) -> Facts:
    """Replace fused normalizations by a sum and a normalization, in place; return the facts with the sums."""
    fused = [node for node in model.graph if node.domain == MICROSOFT and node.op_type in FUSED]
    if any(node.op_type == "SkipLayerNormalization" for node in fused) and opset_of(model) < LAYER_NORM:
        return facts
    shapes, dtypes = dict(facts.shapes), dict(facts.dtypes)
    for node in fused:
        source = (node.inputs[0].name or "") if node.inputs[0] is not None else ""
        sums = [value.name or "" for value in _separated(model.graph, node)]
        if source in shapes:
            shapes |= dict.fromkeys(sums, shapes[source])
            dtypes |= dict.fromkeys(sums, dtypes[source])
    return replace(facts, shapes=shapes, dtypes=dtypes) if fused else facts


def move_before(model: ir.Model, facts: Facts) -> Facts:
    """Put a Transpose before each operand of a product whose first axis the product itself moves after the others.

    The model is changed in place; the facts are returned with the values between the two.
    """
    shapes, dtypes = dict(facts.shapes), dict(facts.dtypes)
    for node in model.graph:
        for position, name in enumerate(MOVED if node.domain == MICROSOFT and node.op_type in PRODUCTS else ()):
            value = node.inputs[position]
            shape = shapes.get(value.name or "") if value is not None else None
            if value is None or shape is None or not integer(node, name):
                continue
            _move(model.graph, node, position, [*range(1, len(shape) - 1), 0, len(shape) - 1], (shapes, dtypes))
            del node.attributes[name]
    return replace(facts, shapes=shapes, dtypes=dtypes)


def multiply(model: ir.Model, facts: Facts) -> Facts:
    """Replace every Einsum of two activations that is a matrix product by MatMul between Transposes, in place.

    The facts are returned with the values between.
    """
    shapes, dtypes = dict(facts.shapes), dict(facts.dtypes)
    for node in [node for node in model.graph if node.op_type == "Einsum" and not node.domain]:
        names = names_of(node.inputs)
        if any(name in facts.constants or name not in shapes for name in names):
            continue
        orders = orders_of(*letters_of(text(node, "equation"), [len(shapes[name]) for name in names]))
        sides = [] if orders is None else [[shapes[names[k]][a] for a in o] for k, o in orders.pairs]
        if orders is not None and sides[0][-1] == sides[1][-2]:  # a product does not repeat what it sums over
            _multiplied(model.graph, node, orders, (shapes, dtypes))
    return replace(facts, shapes=shapes, dtypes=dtypes)


def _multiplied(graph: ir.Graph, node: ir.Node, orders: Orders, known: _Known) -> None:
    """Replace an Einsum by a product."""
    product = ir.Node("", "MatMul", [node.inputs[k] for k, _ in orders.pairs], num_outputs=1, name=node.name)
    product.metadata_props.update(node.metadata_props)  # blocks are named by the modules of their nodes
    graph.insert_before(node, product)
    for position, (_, order) in enumerate(orders.pairs):
        _move(graph, product, position, order, known)
    old, made, last = node.outputs[0], product.outputs[0], orders.after
    name = old.name or ""
    if last != sorted(last):
        made.name, made.type = free_name(graph, f"{name}/product"), old.type
        if name in known[0]:
            known[0][made.name] = tuple(known[0][name][last.index(axis)] for axis in range(len(last)))
            known[1][made.name] = known[1][name]
        label = free_name(graph, f"{name}/Transpose")
        moved = ir.Node("", "Transpose", [made], [ir.AttrInt64s("perm", last)], num_outputs=1, name=label)
        graph.insert_before(node, moved)
        made = moved.outputs[0]
    made.type, made.shape = old.type, old.shape
    old.name, made.name = None, name
    old.replace_all_uses_with(made, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _move(graph: ir.Graph, node: ir.Node, position: int, order: list[int], known: _Known) -> None:
    """Put a Transpose before an operand of a node, unless the order of the axes is as it is."""
    value = given(node, position)
    if order == sorted(order):
        return
    label = free_name(graph, f"{value.name}/moved")
    moved = ir.Node("", "Transpose", [value], [ir.AttrInt64s("perm", order)], num_outputs=1, name=label)
    made = moved.outputs[0]
    made.name, made.type = label, value.type
    graph.insert_before(node, moved)
    node.replace_input_with(position, made)
    shapes, dtypes = known
    shapes[label] = tuple(shapes[value.name or ""][axis] for axis in order)
    dtypes[label] = dtypes[value.name or ""]


def _separated(graph: ir.Graph, node: ir.Node) -> list[ir.Value]:
    """Replace one node; return the sums."""
    simple = node.op_type == "SkipSimplifiedLayerNormalization"
    operands = [*node.inputs, None, None]
    first, skip, gain = operands[:3]
    shift, bias = (None, operands[3]) if simple else (operands[3], operands[4])
    told = node.outputs[3] if len(node.outputs) > 3 else None
    name = told.name if told is not None and told.name else free_name(graph, f"{node.outputs[0].name}/sum")
    sums = [_sum(graph, node, [first, skip], name if bias is None else free_name(graph, f"{name}/skip"))]
    if bias is not None:
        sums.append(_sum(graph, node, [sums[0], bias], name))
    total = sums[-1]
    vectors = [gain] if shift is None else [gain, shift]
    attributes = [ir.AttrInt64("axis", -1), ir.AttrFloat32("epsilon", number(node, "epsilon", EPSILON))]
    norm = ir.Node("", FUSED[node.op_type], [total, *vectors], attributes, num_outputs=1, name=node.name)
    graph.insert_before(node, norm)
    for old, new in ((node.outputs[0], norm.outputs[0]), (told, total)):
        if old is not None:
            name = old.name or name
            new.type, new.shape = node.outputs[0].type, node.outputs[0].shape
            old.name, new.name = None, name
            old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    return sums


def _sum(graph: ir.Graph, before: ir.Node, operands: list[ir.Value | None], name: str) -> ir.Value:
    node = ir.Node("", "Add", operands, num_outputs=1, name=free_name(graph, f"{name}/Add"))
    node.outputs[0].name = name
    graph.insert_before(before, node)
    return node.outputs[0]
