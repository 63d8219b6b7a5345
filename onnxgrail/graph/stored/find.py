"""Find the quantized weights of a graph."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.graph.attributes import given, integer, integers, maker_of, name_of, numbers_of, written
from onnxgrail.graph.stored.integers import Stored
from onnxgrail.graph.stored.looked_up import LookedUp, is_pairs, lookups_of
from onnxgrail.graph.stored.packed import BITS, BYTE, Packed
from onnxgrail.graph.stored.scaled import Scaled
from onnxgrail.graph.stored.stack import Stack
from onnxgrail.graph.stored.turned import turned
from onnxgrail.graph.trace.mixture import STACKS, mixture_of

MOVES = frozenset(
    {
        "QuantizeLinear",
        "Constant",
        "Cast",
        "Identity",
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Slice",
        "Concat",
    }
)  # ops that can produce or pass on integers of any bit width
CODES = (ir.DataType.INT8, ir.DataType.UINT8)
ALONE = "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid", "Softmax"  # QLinear operators with one operand
SCALES: Mapping[str, Collection[int]] = {
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "MatMulNBits": (2, 3, 4),
    "GatherBlockQuantized": (2, 3),
    "DynamicQuantizeMatMul": (2, 3),
    "MatMulIntegerToFloat": (2, 3, 4, 5),
    "MatMulInteger": (2, 3),
    "ConvInteger": (2, 3),
    "QMoE": [place for matrix in STACKS["QMoE"] for place in (matrix.scale, matrix.zero)],
    "QGemm": (1, 2, 4, 5, 7, 8),
    **dict.fromkeys((f"QLinear{name}" for name in ALONE), (1, 2, 3, 4)),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul"), (1, 2, 4, 5, 6, 7)),
}  # inputs that are scales or zero points
SMALL = frozenset(int(k) for k in ir.DataType if k.name.endswith(("INT2", "INT4", "FLOAT4E2M1")))


def stored(model: ir.Model, constants: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Stored]:
    """Return every quantized weight by the name that consumers read: a dequantized value, or packed blocks.

    Args:
        model: the graph.
        constants: names of values that depend on no input.
        shapes: of all tensors as stored in the file.
    """
    found: dict[str, Stored] = {}
    packed: dict[str, list[Packed | Stack]] = {}
    for node in model.graph:
        names = [(v.name or "") if v is not None else "" for v in node.inputs]
        output = node.outputs[0].name or ""
        parts = [(v.name or "") if v is not None else "" for v in parts_of(node)]
        if parts and output in constants and parts[0] in shapes:
            known = _looked_up if node.op_type == "Reshape" else _scaled
            found[output] = known(model, node, parts, shapes)
        elif node.op_type == "Transpose" and names[0] in found:
            backwards = range(len(found[names[0]].shape))[::-1]
            found[output] = turned(found[names[0]], integers(node, "perm", backwards))
        elif node.op_type == "MatMulNBits" and all(n in constants for n in names[1:4] if n):
            packed.setdefault(names[1], []).append(_packed(model, node, names, shapes))
        elif node.op_type == "QMoE":
            for stack in _stacks(model, node, constants, shapes):
                packed.setdefault(stack.packed, []).append(stack)
    alike = {name: some[0] for name, some in packed.items() if some[0].bits in BITS and len(set(some)) == 1}
    return {**found, **alike}


def is_dequantised(node: ir.Node) -> bool:
    """Return True if a node converts integers with scales to floats."""
    return bool(parts_of(node))


def is_wide(value: ir.Value) -> bool:
    """Return True if a value is made of stored integers of 32 bits with stored scales, as the bias of a layer is."""
    node = value.producer()
    if node is None or node.op_type != "DequantizeLinear":
        return False
    stored = [v.const_value for v in node.inputs[:2] if v is not None]
    return None not in stored and stored[0] is not None and stored[0].dtype == ir.DataType.INT32


def parts_of(node: ir.Node) -> tuple[ir.Value | None, ...]:
    """Return integers, scales and zero points of a node that converts integers to floats; () for other nodes.

    The node is a `DequantizeLinear`; a `Mul` of constants: of a `Cast` of 8 bits, and of scales along one axis; or the
    last one of lookups of 4 bits, see `looked_up.Parts`.
    """
    if node.op_type == "DequantizeLinear":
        return tuple(node.inputs)
    if node.op_type == "Reshape":
        return lookups_of(node) or ()
    cast = maker_of(node, 0) if node.op_type == "Mul" else None
    codes = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
    scale = node.inputs[1] if codes is not None else None
    if codes is None or scale is None or codes.dtype not in CODES:
        return ()
    if any(v.const_value is None or v.producer() is not None or v.is_graph_input() for v in (codes, scale)):
        return ()
    if any(use.node.op_type != "Cast" for use in codes.uses()):
        return ()
    assert codes.const_value is not None
    assert scale.const_value is not None
    sizes, scales = codes.const_value.shape.numpy(), scale.const_value.shape.numpy()
    wide = [axis for axis, size in enumerate(scales) if size > 1]
    fits = len(scales) == len(sizes) and len(wide) < 2 and all(scales[axis] == sizes[axis] for axis in wide)
    return (codes, scale) if fits else ()


def scales_of(graph: ir.Graph) -> set[ir.Value]:
    """Return the constants by which nodes of a graph read quantized numbers: scales, zero points, tables of codes."""
    held = ((value, value.const_value) for value in graph.initializers.values())
    found: set[ir.Value | None] = {value for value, tensor in held if tensor is not None and is_pairs(tensor)}
    for node in graph:
        found.update(value for place, value in enumerate(node.inputs) if place in SCALES.get(node.op_type, ()))
        found.update(parts_of(node)[1:])
        makers = [maker_of(node, place) for place in range(len(node.inputs))] if node.op_type == "Mul" else []
        if any(maker is not None and maker.op_type == "DynamicQuantizeLinear" for maker in makers):
            found.update(node.inputs)  # scales of both operands of a product of integers
    return {value for value in found if value is not None}


def below_a_byte(model: ir.Model) -> frozenset[str]:
    """Return the names of computed values with fewer than eight bits per number: the runtime cannot return them."""
    found: set[str] = set()
    for node in model.graph:
        kinds = {integer(node, name, 0) for name in ("to", "output_dtype")}
        inputs = [v for v in node.inputs if v is not None]
        passed = {int(v.dtype) for v in [*inputs, *node.outputs] if v.dtype is not None}
        tensor = written(node)
        if tensor is not None:
            passed.add(int(tensor.dtype))
        if node.op_type in MOVES and ((kinds | passed) & SMALL or any(v.name in found for v in inputs)):
            found.update(v.name for v in node.outputs if v.name)
    return frozenset(found)


def _scaled(model: ir.Model, node: ir.Node, names: list[str], shapes: Mapping[str, tuple[int, ...]]) -> Scaled:
    shape = shapes[names[0]]
    scale = shapes[names[1]]
    size = integer(node, "block_size", 0)
    axis = integer(node, "axis", 1) % max(len(shape), 1)
    if node.op_type == "Mul":
        axis = int(np.argmax(scale))
    return Scaled(
        shape=shape,
        dtype=_dtype(model, node, names[1]),
        quantised=names[0],
        scale=names[1],
        zero=names[2] if len(names) > 2 else "",
        axis=axis,
        size=size,
        per_axis=len(shape) > 0 and _per_axis(node, scale, shape[axis]),
        named=names[0] if names[0] in model.graph.initializers else _float_of(node) or node.outputs[0].name or "",
        bits=_bits(model, names[0]),
    )


def _float_of(node: ir.Node) -> str:
    """Return the name of the stored float array that the graph quantizes for this node alone; '' if there is none."""
    maker = maker_of(node, 0)
    source = None if maker is None or maker.op_type != "QuantizeLinear" else maker.inputs[0]
    if source is None or source.const_value is None:
        return ""
    alone = len(source.uses()) == len(given(node, 0).uses()) == 1
    return (source.name or "") if alone else ""


def _looked_up(model: ir.Model, node: ir.Node, names: list[str], shapes: Mapping[str, tuple[int, ...]]) -> LookedUp:
    codes, scale, places, target = names
    return LookedUp(
        shape=tuple(numbers_of(model.graph.initializers[target]).tolist()),
        dtype=_dtype(model, node, scale),
        codes=codes,
        scale=scale,
        places=places,
        blocks=shapes[scale][1],
        named=node.outputs[0].name or "",
    )


def _per_axis(node: ir.Node, scale: tuple[int, ...], size: int) -> bool:
    """Return True if every position on an axis of this size has its scale."""
    return math.prod(scale) == size if node.op_type == "Mul" else len(scale) == 1 and scale[0] == size


def _packed(model: ir.Model, node: ir.Node, names: list[str], shapes: Mapping[str, tuple[int, ...]]) -> Packed:
    return Packed(
        shape=(integer(node, "N", 0), integer(node, "K", 0)),
        dtype=_dtype(model, node, names[2]),
        packed=names[1],
        scale=names[2],
        zero=names[3] if len(names) > 3 else "",
        bits=integer(node, "bits", 4),
        size=integer(node, "block_size", 32),
        flat=len(shapes[names[2]]) == 1,
        fractions=len(names) > 3 and bool(names[3]) and _dtype(model, node, names[3]) != np.uint8,
    )


def _stacks(
    model: ir.Model, node: ir.Node, constants: Collection[str], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Stack]:
    """Yield the weights of a QMoE whose shapes are consistent."""
    form = mixture_of(node)
    for matrix, bits in zip((form.up, form.down, form.gate), form.bits, strict=True):
        packed, scale, zero = (name_of(node, k) for k in (matrix.weight, matrix.scale, matrix.zero))
        if bits not in BITS or not {packed, scale, zero or packed} <= set(constants) or len(shapes[packed]) != 3:
            continue
        experts, rows, columns = shapes[packed]
        shape = (experts, rows, columns * BYTE // bits)
        blocks = -(-shape[2] // form.size) if form.size else 1
        if math.prod(shapes[scale]) == experts * rows * blocks:
            places = (matrix.weight, matrix.scale, matrix.zero)
            kind = _dtype(model, node, scale)
            yield Stack(shape, kind, packed, scale, zero, bits, form.size, places)


def _bits(model: ir.Model, name: str) -> int:
    value = model.graph.initializers.get(name)
    return value.const_value.dtype.bitwidth if value is not None and value.const_value is not None else BYTE


def _dtype(model: ir.Model, node: ir.Node, scale: str) -> np.dtype[Any]:
    """Return the dtype of the dequantized numbers: the one stated by the node, or else the scale's."""
    asked = integer(node, "output_dtype", 0)
    if asked:
        return ir.DataType(asked).numpy()
    value = model.graph.initializers.get(scale)
    if value is not None and value.const_value is not None:
        return value.const_value.dtype.numpy()
    return np.dtype(np.float32)
