"""Op rules of pointwise ops: activations, arithmetic with broadcasting, selection, also between branches of an If."""

from __future__ import annotations

import numpy as np

from onnxgrail.graph.attributes import MICROSOFT
from onnxgrail.graph.ops.rule import narrow, rule
from onnxgrail.graph.ops.tensors.broadcast import TABLE, combine, operand, positions_of
from onnxgrail.graph.ops.tensors.cut import Cut
from onnxgrail.graph.ops.tensors.filled import is_filled, pick
from onnxgrail.graph.ops.tensors.layout import made
from onnxgrail.graph.rotate.marked import PICKED
from onnxgrail.graph.trace.facts import CHOICE, OWN
from onnxgrail.graph.trace.flow import Site

UNLIKE = "the branches of {} make tensors of different shapes"


@rule("QuickGelu", domain=MICROSOFT)
@rule(
    "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Erf", "Gelu", "Softplus", "Softsign", "HardSwish", "HardSigmoid", "Clip",
    "Abs", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Cast", "Identity", "Dropout", "Elu", "Selu", "Celu", "Mish",
    "Swish", "Not", "IsNaN", "IsInf", "Sin", "Cos", "Tan", "Sign", "Floor", "Ceil", "Round", "ThresholdedRelu",
    "Affine", "ParametricSoftplus", "ScaledTanh",  # of the first opsets, as Core ML converters write them
    "Shrink", "BitwiseNot",
    "CastLike", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh",
)  # fmt: skip
def unary(site: Site) -> None:
    """Pass unchanged."""
    for output in range(len(site.node.outputs)):
        site.emit(site.marks(0), output)


BINARY = (
    "Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum", "Mean", "And", "Or", "Xor", "Equal", "Greater", "Less",
    "GreaterOrEqual", "LessOrEqual", "Mod", "Where", "PRelu", "BitwiseAnd", "BitwiseOr",
    "BitwiseXor", "BitShift",
)  # fmt: skip


@rule(*BINARY)
def binary(site: Site) -> None:
    """Tie operands of full width position by position; cut constants along the channels."""
    if made(site):
        return
    shape = site.out_shape()
    operands = [operand(site, k, len(shape)) for k in site.operands]
    if site.node.op_type in ("Add", "Sub", "Sum"):
        _note_stream(site, shape)
    table = positions_of(site, operands, shape)
    if table is not None:  # the node's rewrite gathers what it needs
        site.freeze(table.marks, TABLE)
        operands.remove(table)
    filled = [o.operand for o in operands if not o.constant and not o.marks and is_filled(site, o.operand)]
    site.emit(combine(site, operands, shape, filled=filled))


@narrow(*BINARY)
def narrow_binary(cut: Cut) -> None:
    """Gather the kept positions from an operand filled with one number, or from a table of positions."""
    shape, alive = cut.shape(cut.output_name()), cut.alive(cut.output_name())
    for k in range(len(cut.node.inputs)):
        name = cut.input_name(k)
        constant = name in cut.facts.constants and cut.node.metadata_props.get(PICKED) != str(k)
        if not name or constant or 0 in shape:
            continue
        own, offset = cut.alive(name), len(shape) - len(cut.shape(name))
        lost = {
            axis - offset: stays
            for axis, stays in alive.items()
            if axis >= offset and axis - offset not in own and cut.shape(name)[axis - offset] == shape[axis]
        }
        pick(cut, k, lost)


def _note_stream(site: Site, shape: tuple[int, ...]) -> None:
    """Record a residual stream if two different activations of full size are added on the same channels."""
    full = [site.marks(k) for k in site.operands if site.shape(k) == shape and not _tabled(site, k)]
    if len(full) < 2:
        return
    for a in full[0]:
        for b in full[1]:
            if a.axes == b.axes and not np.array_equal(a.labels, b.labels):
                site.kind(a.labels, "stream")


def _tabled(site: Site, operand: int) -> bool:
    """Return True for a constant, and for values gathered from one: gathered biases of experts are not a stream."""
    value = site.node.inputs[operand]
    while value is not None and value.name not in site.flow.facts.constants:
        node = value.producer()
        if node is None or node.op_type not in ("Gather", "Reshape", "Squeeze", "Unsqueeze", "Cast"):
            return False
        value = node.inputs[0]
    return True


@rule(CHOICE, domain=OWN)
def choice(site: Site) -> None:
    """Tie channels that leave an If across its branches; a constant returned by one branch is cut."""
    count = len(site.node.outputs)
    site.marks(0)
    for output in range(count):
        sides = (1 + output, 1 + count + output)
        shape = site.out_shape(output)
        if any(_unlike(site, k, shape) for k in sides):
            name = site.node.name or site.key
            site.freeze([mark for k in sides for mark in site.marks(k)], UNLIKE.format(name))
        else:
            site.emit(combine(site, [operand(site, k, len(shape)) for k in sides], shape), output)


def _unlike(site: Site, position: int, shape: tuple[int, ...]) -> bool:
    """Return True if a branch differs from the output in its rank, or in the size of an axis with channels."""
    own = site.shape(position)
    axes = {axis for mark in site.marks(position) for axis in mark.axes}
    return len(own) != len(shape) or any(own[axis] != shape[axis] for axis in axes)
