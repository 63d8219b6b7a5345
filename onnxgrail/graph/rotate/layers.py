"""Matrices and convolutions that write into a residual stream or read from it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.graph.attributes import given, input_of, integer, integers, number, text
from onnxgrail.graph.products import axes_of, is_product
from onnxgrail.graph.rotate.norms import Norm
from onnxgrail.graph.trace.facts import Facts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slot:
    """A constant operand with one axis in the basis of a stream.

    Attributes:
        node, operand: where it is read.
        axis: the axis.
        norm: for a weight that reads normalized values, their normalization.
        reads: the weight contracts the axis; otherwise the operand is added to the stream, or computes what is.
        also: other operands that read the same constant.
    """

    node: ir.Node
    operand: int
    axis: int
    norm: Norm | None = None
    reads: bool = False
    also: tuple[tuple[ir.Node, int], ...] = ()

    @property
    def value(self) -> ir.Value:
        """Return the constant."""
        return given(self.node, self.operand)


def writing(node: ir.Node, axis: int, facts: Facts) -> list[Slot] | None:
    """Return the operands that make the channels of a node's output; None if these are no linear map of its input."""
    shape = facts.shapes[node.outputs[0].name or ""]
    weight = weight_of(node, facts)
    if weight is None:
        return None
    rank = len(facts.shapes[weight.name or ""])
    if is_product(node):
        _, _, kept = axes_of(node, (len(shape), rank))
        return [Slot(node=node, operand=1, axis=kept)] if axis == len(shape) - 1 and rank > 1 else None
    bias = input_of(node, 2)
    if bias is not None and facts.shapes.get(bias.name or "", ())[-1:] != (shape[axis],):
        return None
    if axis != 1 or (bias is not None and bias.name not in facts.constants):
        return None
    at = 0 if node.op_type == "Conv" or integer(node, "transB") else 1
    found = [Slot(node=node, operand=1, axis=at)]
    if bias is not None:
        found.append(Slot(node=node, operand=2, axis=len(facts.shapes[bias.name or ""]) - 1))
    return found


def reading(node: ir.Node, operand: int, axis: int, norm: Norm | None, facts: Facts) -> Slot | None:
    """Return the weight that contracts the channels of a node's input; None if the node is no linear map of them."""
    weight = weight_of(node, facts)
    if weight is None or operand != 0:
        return None
    shape, rank = facts.shapes[node.inputs[0].name or ""], len(facts.shapes[weight.name or ""])  # type: ignore[union-attr]
    shifted = norm is not None and norm.shift is not None
    if is_product(node):
        _, met, _ = axes_of(node, (len(shape), rank))
        fits = axis == len(shape) - 1 and rank > 1 and (rank == 2 or not shifted)
        return Slot(node=node, operand=1, axis=met, norm=norm, reads=True) if fits else None
    padded = node.op_type == "Conv" and _is_padded(node)
    if axis != 1 or (shifted and (padded or not factor_of_bias(node))):
        return None
    at = 1 if node.op_type == "Conv" or integer(node, "transB") else 0
    return Slot(node=node, operand=1, axis=at, norm=norm, reads=True)


def _is_padded(conv: ir.Node) -> bool:
    """Return True if a convolution reads zeros beside its input, where what is added to all of it is missing."""
    return any(integers(conv, "pads")) or text(conv, "auto_pad") not in ("", "NOTSET", "VALID")


def factor_of_bias(node: ir.Node) -> float:
    """Return the number that a layer multiplies its bias by."""
    return number(node, "beta", 1.0) if node.op_type == "Gemm" else 1.0


def weight_of(node: ir.Node, facts: Facts) -> ir.Value | None:
    """Return the constant float weight of a matrix product or a convolution without groups."""
    known = node.op_type in ("Gemm", "Conv") and not node.domain
    if not (known or is_product(node)) or integer(node, "transA") or integer(node, "group", 1) != 1:
        return None
    value = node.inputs[1]
    if value is None or value.name not in facts.constants or value.name in facts.stored:
        return None
    return value if facts.has_floats(value.name or "") else None
