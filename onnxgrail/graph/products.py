"""Matrix products, those of the standard and those of ONNX Runtime, and attention that is made of them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

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


def letters_of(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Return a letter for every axis of every operand of an Einsum, and of the result.

    An ellipsis gets letters of its own.  Without an arrow, the result has these first, then the letters that occur
    once, in alphabetical order.

    Args:
        equation: as the operator has it.
        ranks: number of axes of each operand.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = [n - len(t.replace("...", "")) if "..." in t else 0 for t, n in zip(terms, ranks, strict=True)]
    unused = "".join(chr(code) for code in range(0x3B1, 0x3B1 + max(hidden)))
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        right = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    spelled = [t.replace("...", unused[len(unused) - n :]) for t, n in zip(terms, hidden, strict=True)]
    return spelled, right.replace("...", unused)


@dataclass(frozen=True, slots=True)
class Orders:
    """A matrix product that an Einsum is, between transposed operands and a transposed result.

    Attributes:
        pairs: for both operands of the product, which operand of the Einsum it is, and the order of its axes.
        after: the order of the axes of what the product computes.
    """

    pairs: tuple[tuple[int, list[int]], tuple[int, list[int]]]
    after: list[int]


def orders_of(terms: Sequence[str], result: str) -> Orders | None:
    """Return the matrix product that an Einsum is; None if it is none.

    Each of two operands must have one axis of its own, one that is summed, and the others in common.
    """
    if len(terms) != 2 or any(len(set(term)) < len(term) for term in (*terms, result)):
        return None
    batch = [c for c in result if c in terms[0] and c in terms[1]]
    own = [c for c in result if c not in batch]
    summed = [c for c in terms[0] if c not in result]
    if len(own) != 2 or len(summed) != 1:
        return None
    operands = (0, 1) if own[0] in terms[0] else (1, 0)
    pairs = [*zip(operands, ([*batch, own[0], *summed], [*batch, *summed, own[1]]), strict=True)]
    if any(sorted(side) != sorted(terms[k]) for k, side in pairs):
        return None
    first, second = ((k, [terms[k].index(c) for c in side]) for k, side in pairs)
    return Orders((first, second), [[*batch, *own].index(c) for c in result])


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
