"""Separate the residual sums and the moved batch axes that ONNX Runtime fuses into normalizations and products."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from onnxgrail.graph.attributes import MICROSOFT, integer, number
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.products import FUSED as PRODUCTS
from onnxgrail.graph.rewrite.unique import free_name
from onnxgrail.graph.rotate.marked import PLAIN
from onnxgrail.graph.trace.facts import Facts

FUSED = {"SkipLayerNormalization": "LayerNormalization", "SkipSimplifiedLayerNormalization": PLAIN}
EPSILON = 1e-12  # the default of both
LAYER_NORM = 17  # first opset with LayerNormalization
MOVED = ("transBatchA", "transBatchB")  # attributes of fused products, for each operand


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
            order = [*range(1, len(shape) - 1), 0, len(shape) - 1]
            label = free_name(model.graph, f"{value.name}/moved")
            moved = ir.Node("", "Transpose", [value], [ir.AttrInt64s("perm", order)], num_outputs=1, name=label)
            made = moved.outputs[0]
            made.name, made.type = label, value.type
            model.graph.insert_before(node, moved)
            node.replace_input_with(position, made)
            del node.attributes[name]
            shapes[label] = tuple(shape[axis] for axis in order)
            dtypes[label] = dtypes[value.name or ""]
    return replace(facts, shapes=shapes, dtypes=dtypes)


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
