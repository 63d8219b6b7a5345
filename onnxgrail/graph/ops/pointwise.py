"""Ops that act on every position alone: activations, arithmetic with broadcasting, selection."""

from __future__ import annotations

import numpy as np

from onnxgrail.graph.flow import Site
from onnxgrail.graph.ops.broadcast import combine, operand
from onnxgrail.graph.ops.rule import rule


@rule(
    "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Erf", "Gelu", "Softplus", "Softsign", "HardSwish", "HardSigmoid", "Clip",
    "Abs", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Cast", "Identity", "Dropout", "Elu", "Selu", "Celu", "Mish",
    "Swish", "Not", "IsNaN", "IsInf", "Sin", "Cos", "Tan", "Sign", "Floor", "Ceil", "Round", "ThresholdedRelu",
    "Shrink", "BitwiseNot",
    "CastLike", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh",
)  # fmt: skip
def unary(site: Site) -> None:
    """Pass unchanged."""
    for output in range(len(site.node.outputs)):
        site.emit(site.marks(0), output)


@rule("QuickGelu", domain="com.microsoft")
def microsoft_unary(site: Site) -> None:
    """Pass unchanged."""
    site.emit(site.marks(0))


@rule(
    "Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "And", "Or", "Xor", "Equal", "Greater", "Less",
    "GreaterOrEqual", "LessOrEqual", "Mod", "Where", "PRelu", "BitwiseAnd", "BitwiseOr",
    "BitwiseXor", "BitShift",
)  # fmt: skip
def binary(site: Site) -> None:
    """Operands of full width are tied position by position; constants along the channels are cut."""
    shape = site.out_shape()
    operands = [operand(site, k, len(shape)) for k in site.operands]
    if site.node.op_type in ("Add", "Sub", "Sum"):
        _note_stream(site, shape)
    site.emit(combine(site, operands, shape))


def _note_stream(site: Site, shape: tuple[int, ...]) -> None:
    """Two different activations of full size added on the same channels: a residual stream."""
    full = [site.marks(k) for k in site.operands if site.shape(k) == shape and not site.is_constant(k)]
    if len(full) < 2:
        return
    for a in full[0]:
        for b in full[1]:
            if a.axes == b.axes and not np.array_equal(a.labels, b.labels):
                site.kind(a.labels, "stream")
