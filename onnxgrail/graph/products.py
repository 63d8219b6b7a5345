"""Matrix products, those of the standard and those of ONNX Runtime: a factor and transposed operands beside them."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.attributes import MICROSOFT, integer

FUSED = ("FusedMatMul", "TransposeMatMul")


def is_fused(node: ir.Node) -> bool:
    """Return True for ONNX Runtime's matrix product with a factor and transposed operands, if batch axes come first."""
    moved = integer(node, "transBatchA") or integer(node, "transBatchB")
    return node.domain == MICROSOFT and node.op_type in FUSED and not moved


def is_product(node: ir.Node) -> bool:
    """Return True for a matrix product, fused or not, whose batch axes come first."""
    return (node.op_type == "MatMul" and node.domain in ("", "ai.onnx")) or is_fused(node)


def axes_of(node: ir.Node, ranks: tuple[int, int]) -> tuple[int, int, int]:
    """Return the axes of a matrix product's operands: summed of the first, summed of the second, kept of the second."""
    first, second = (integer(node, name) if is_fused(node) else 0 for name in ("transA", "transB"))
    swap = 1 if second else 0
    return ranks[0] - (2 if first else 1), ranks[1] - 2 + swap, ranks[1] - 1 - swap
