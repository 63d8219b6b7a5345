"""Write plain operators for fused ones, so that streams and channels inside heads can be followed.

ONNX Runtime fuses residual sums into normalizations, and moved axes into products; Einsum is a product with moved axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.graph.attributes import MICROSOFT, given, integer, name_of, names_of, number, text
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.products import FUSED as PRODUCTS
from onnxgrail.graph.products import letters_of, orders_of
from onnxgrail.graph.rewrite.unique import free_name, take_place
from onnxgrail.graph.rotate.marked import PLAIN
from onnxgrail.graph.trace.facts import Facts, constant_of

FUSED = {"SkipLayerNormalization": "LayerNormalization", "SkipSimplifiedLayerNormalization": PLAIN}
EPSILON = 1e-12  # the default of both
LAYER_NORM = 17  # first opset with LayerNormalization
PAIR = 2  # operands of a product, and axes of a matrix
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


def move_axes(model: ir.Model, facts: Facts) -> Facts:
    """Put a Transpose wherever a product itself moves axes of its operands or of its result.

    A fused product may move the first axis after the others. An Einsum of two activations, or of one and a matrix, that
    is a matrix product becomes one. The model is changed in place; the facts are returned with the new values.
    """
    products = [node for node in model.graph if node.domain == MICROSOFT and node.op_type in PRODUCTS]
    sums = [node for node in model.graph if not node.domain and node.op_type == "Einsum"]
    if not products and not sums:
        return facts
    known, turned = (dict(facts.shapes), dict(facts.dtypes)), dict[str, Array]()
    for node in products:
        _move_first(model.graph, node, known)
    for node in sums:
        names = names_of(node.inputs)
        if not all(name in known[0] for name in names):
            continue
        if facts.constants.isdisjoint(names):
            _multiply(model.graph, node, known)
        elif len(names) == PAIR and names[0] not in facts.constants:
            turned |= _multiply_weight(model.graph, node, known, facts)
    constants, values = facts.constants | turned.keys(), {**facts.values, **turned}
    return replace(facts, shapes=known[0], dtypes=known[1], constants=constants, values=values)


def _multiply_weight(graph: ir.Graph, node: ir.Node, known: _Known, facts: Facts) -> dict[str, Array]:
    """Replace an Einsum by the product with a matrix that it is; return the matrix by its name if it was transposed."""
    shapes, _ = known
    (rows, weight), result = letters_of(text(node, "equation"), [len(shapes[name]) for name in names_of(node.inputs)])
    own = [letter for letter in weight if letter != rows[-1]]
    array = constant_of(node.inputs[1], name_of(node, 1), facts)
    matrix = array is not None and len(weight) == PAIR and len(own) == 1
    if array is None or not matrix or rows[-1] in result or result != rows[:-1] + own[0]:
        return {}
    product = _product_before(graph, node, node.inputs)
    turned = weight[0] != rows[-1]
    if turned:
        _move(graph, product, 1, [1, 0], known)
    take_place(node.outputs[0], product.outputs[0])
    graph.remove(node, safe=True)
    return {name_of(product, 1): array.T} if turned else {}


def _move_first(graph: ir.Graph, node: ir.Node, known: _Known) -> None:
    """Move the first axis of operands before a fused product, instead of in it."""
    for position, name in enumerate(MOVED):
        shape = known[0].get(name_of(node, position))
        if shape is not None and integer(node, name):
            _move(graph, node, position, [*range(1, len(shape) - 1), 0, len(shape) - 1], known)
            del node.attributes[name]


def _multiply(graph: ir.Graph, node: ir.Node, known: _Known) -> None:
    """Replace an Einsum by a product, if it is one."""
    shapes, dtypes = known
    sizes = [shapes[name] for name in names_of(node.inputs)]
    orders = orders_of(*letters_of(text(node, "equation"), [len(size) for size in sizes]))
    if orders is None:
        return
    (left, first), (right, second) = orders.pairs
    if sizes[left][first[-1]] != sizes[right][second[-2]]:  # a product does not repeat what it sums over
        return
    product = _product_before(graph, node, [node.inputs[left], node.inputs[right]])
    for position, order in enumerate((first, second)):
        _move(graph, product, position, order, known)
    old, made, after = node.outputs[0], product.outputs[0], orders.after
    if after != sorted(after):
        made.name, made.type = free_name(graph, f"{old.name}/product"), old.type
        if old.name in shapes:
            shapes[made.name] = tuple(shapes[old.name][after.index(axis)] for axis in range(len(after)))
            dtypes[made.name] = dtypes[old.name]
        moved = _transpose(made, after, free_name(graph, f"{old.name}/Transpose"))
        graph.insert_before(node, moved)
        made = moved.outputs[0]
    take_place(old, made)
    graph.remove(node, safe=True)


def _product_before(graph: ir.Graph, node: ir.Node, operands: Sequence[ir.Value | None]) -> ir.Node:
    """Insert a product of two operands before the node that it replaces, and return it."""
    product = ir.Node("", "MatMul", operands, num_outputs=1, name=node.name)
    product.metadata_props.update(node.metadata_props)  # blocks are named by the modules of their nodes
    graph.insert_before(node, product)
    return product


def _move(graph: ir.Graph, node: ir.Node, position: int, order: list[int], known: _Known) -> None:
    """Put a Transpose before an operand of a node, unless the order of the axes is as it is."""
    value = given(node, position)
    if order == sorted(order):
        return
    label = free_name(graph, f"{value.name}/moved")
    moved = _transpose(value, order, label)
    made = moved.outputs[0]
    made.name, made.type = label, value.type
    graph.insert_before(node, moved)
    node.replace_input_with(position, made)
    shapes, dtypes = known
    shapes[label] = tuple(shapes[value.name or ""][axis] for axis in order)
    dtypes[label] = dtypes[value.name or ""]


def _transpose(value: ir.Value, order: list[int], name: str) -> ir.Node:
    return ir.Node("", "Transpose", [value], [ir.AttrInt64s("perm", order)], num_outputs=1, name=name)


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
    if told is not None:
        told.type, told.shape = node.outputs[0].type, node.outputs[0].shape
        take_place(told, total)
    take_place(node.outputs[0], norm.outputs[0])
    graph.remove(node, safe=True)
    return sums


def _sum(graph: ir.Graph, before: ir.Node, operands: list[ir.Value | None], name: str) -> ir.Value:
    node = ir.Node("", "Add", operands, num_outputs=1, name=free_name(graph, f"{name}/Add"))
    node.outputs[0].name = name
    graph.insert_before(before, node)
    return node.outputs[0]
