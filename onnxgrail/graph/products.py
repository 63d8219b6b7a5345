"""Matrix products, those of the standard and those of ONNX Runtime, and attention that is made of them."""

from __future__ import annotations

from collections.abc import Container

import onnx_ir as ir

from onnxgrail.graph.attributes import MICROSOFT, integer

SCALES = ("Mul", "Div", "Add", "Where", "Cast", "Identity", "Reshape", "Clip", "Tanh")  # between scores and a softmax
STEPS = 8  # most of them


FUSED = ("FusedMatMul", "TransposeMatMul")


def is_fused(node: ir.Node) -> bool:
    """Return True for ONNX Runtime's matrix product with a factor and transposed operands, if batch axes come first."""
    moved = integer(node, "transBatchA") or integer(node, "transBatchB")
    return node.domain == MICROSOFT and node.op_type in FUSED and not moved


def is_product(node: ir.Node) -> bool:
    """Return True for a matrix product, fused or not, whose batch axes come first."""
    return (node.op_type == "MatMul" and not node.domain) or is_fused(node)


def axes_of(node: ir.Node, ranks: tuple[int, int]) -> tuple[int, int, int]:
    """Return the axes of a matrix product's operands: summed of the first, summed of the second, kept of the second."""
    first, second = (integer(node, name) if is_fused(node) else 0 for name in ("transA", "transB"))
    swap = 1 if second else 0
    return ranks[0] - (2 if first else 1), ranks[1] - 2 + swap, ranks[1] - 1 - swap


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
