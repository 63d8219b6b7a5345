"""Attention in a graph: products of queries and keys, a softmax, and products with values."""

from __future__ import annotations

from collections.abc import Container

import onnx_ir as ir

SCALES = ("Mul", "Div", "Add", "Where", "Cast", "Identity", "Reshape", "Clip", "Tanh")  # between scores and a softmax
STEPS = 8  # most of them


def makes_scores(node: ir.Node) -> bool:
    """Return True if a softmax follows a node, after scales and masks at most."""
    value = node.outputs[0]
    for _ in range(STEPS):
        readers = [use.node for use in value.uses() if use.node.op_type in (*SCALES, "Softmax")]
        if not readers or readers[0].op_type == "Softmax":
            return bool(readers)
        value = readers[0].outputs[0]
    return False


def reads_weights(node: ir.Node) -> bool:
    """Return True if a softmax, with a mask or a cast at most, computes the first operand of a product."""
    value = node.inputs[0]
    for _ in range(STEPS):
        before = value.producer() if value is not None else None
        if before is None or before.op_type == "Softmax":
            return before is not None
        value = next((v for v in before.inputs[::-1] if v is not None and v.producer()), None)
    return False


def scores_of(node: ir.Node, products: Container[ir.Node]) -> ir.Node | None:
    """Return the one of `products`, of queries and keys, that makes the weights of values; None if none is near."""
    above = [node.inputs[0]]
    for _ in range(2 * STEPS):
        before = {value.producer(): None for value in above if value is not None}
        asked = next((one for one in before if one in products), None)
        if asked is not None:
            return asked
        above = [value for one in before if one is not None for value in one.inputs]
    return None
