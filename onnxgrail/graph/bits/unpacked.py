"""Store weights in 4 bits that a runtime converts to float once, when it loads the model.

No kernel of ONNX Runtime convolves with 4 bits, and a `DequantizeLinear` of a constant runs in each run.  Lookups in a
constant table are folded: every byte gives two numbers.  They need no opset.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Grid, Rounded
from onnxgrail.graph.attributes import integer
from onnxgrail.graph.bits.folded import Codes
from onnxgrail.graph.bits.matrices import LEAST, first, stored_bytes
from onnxgrail.graph.bits.slots import CONVOLUTIONS, FLOATS, TRANSPOSED
from onnxgrail.graph.fittable.matrices import LINEAR, WEIGHTED, Matrix, swept
from onnxgrail.graph.flatten.branches import in_branch
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import free_name
from onnxgrail.graph.stored.looked_up import pairs_of_a_byte
from onnxgrail.graph.stored.packed import BYTE, packed_bits

BITS = 4
PAIRS = "pairs_of_4_bits"  # name of the table: two numbers per byte, low bits first
NODES, NAMES = 380, 21  # bytes of the nodes and tensors that replace a weight, and how often they repeat its name
PAIRS_BYTES = 2**BYTE * (BYTE // BITS) * 4
FIRST = "the first layer keeps more bits"
GROUPED = "groups of channels keep more bits"
IN_HALF = "layers in half precision keep more bits"
TURNED = "transposed convolutions keep more bits"
UNEVEN = f"its inputs do not divide into even blocks of {LEAST} or more"
HARDLY = "4 bits would hardly take fewer bytes"
SHARED = "its weight is no initializer that it alone reads"


def convolutions(model: ir.Model) -> list[tuple[ir.Node, Matrix | None, str]]:
    """Return the convolutions with constant float weights, in node order.

    Returns:
        Node; its weight as a matrix (inputs times taps, outputs), or None and the reason why it has more than 4 bits.
    """
    found, reached = [], set[ir.Value]()
    for node in model.graph:
        after = any(value in reached for value in node.inputs if value is not None)
        weight = node.inputs[1] if node.op_type in CONVOLUTIONS and len(node.inputs) > 1 else None
        tensor = weight.const_value if weight is not None and not in_branch(weight) else None
        if weight is not None and tensor is not None and tensor.dtype in FLOATS:
            kind = TURNED if node.op_type == TRANSPOSED else GROUPED if integer(node, "group", 1) > 1 else ""
            kind = kind if tensor.dtype == ir.DataType.FLOAT else IN_HALF
            own = weight.is_initializer() and not weight.is_graph_input() and len(weight.uses()) == 1
            why = kind or ("" if after else FIRST) or ("" if own else SHARED)
            outputs, *inputs = (int(size) for size in tensor.shape.numpy())
            name, taps = weight.name or "", math.prod(inputs)
            matrix = Matrix(weight=name, turned=True, nodes=(node,), inputs=taps, outputs=outputs)
            found.append((node, None if why else matrix, why))
        if after or node.op_type in LINEAR | WEIGHTED:
            reached.update(node.outputs)
    return found


def whole_blocks(matrix: Matrix, most: int) -> Grid | None:
    """Return the form of a convolution, in the largest blocks that divide its inputs; None if there are none."""
    sizes = [size for size in range(LEAST, most + 1, BYTE // BITS) if matrix.inputs % size == 0]
    return Grid(bits=BITS, size=max(sizes), symmetric=True) if sizes else None


def node_bytes(matrix: Matrix) -> int:
    """Return the bytes of the nodes and tensors that convert a weight, without its numbers."""
    return NODES + NAMES * len(matrix.weight)


def saved(matrix: Matrix, grid: Grid) -> int:
    """Return the bytes that 4 bits save over 8."""
    least = stored_bytes(matrix.inputs, matrix.outputs, grid) + node_bytes(matrix)
    return Codes(BYTE, (1,), matrix.weight).bytes((matrix.outputs, matrix.inputs)) - least


def unpack(graph: ir.Graph, matrix: Matrix, rounded: Rounded) -> None:
    """Store a convolution or a matrix in 4 bits.

    Args:
        graph: changed in place.
        matrix: the weight; it is removed.
        rounded: its numbers, symmetric, in blocks that divide the inputs.
    """
    weight, grid = graph.initializers[matrix.weight], rounded.grid
    assert weight.const_value is not None
    stored = weight.const_value.shape.numpy()
    shape = np.array(stored if len(stored) > 2 else (matrix.outputs, matrix.inputs), np.int64)
    blocks = rounded.codes.T.reshape(matrix.outputs, -1, grid.size)
    codes = constant(graph, packed_bits(blocks, BITS), f"{matrix.weight}/q4", old=weight)
    scale = constant(graph, rounded.scale.T[..., None, None], f"{matrix.weight}/scale", old=weight)
    target, pairs = constant(graph, shape, f"{matrix.weight}/shape"), _pairs(graph)
    index = ir.Node("", "Cast", [codes], [ir.AttrInt64("to", int(ir.DataType.INT32))], num_outputs=1)
    number = ir.Node("", "Gather", [pairs, index.outputs[0]], num_outputs=1)
    scaled = ir.Node("", "Mul", [number.outputs[0], scale], num_outputs=1)
    whole = ir.Node("", "Reshape", [scaled.outputs[0], target], num_outputs=1)
    first(graph, index)
    sizes = [*blocks.shape[:2], grid.size * BITS // BYTE]
    wide = [*sizes, BYTE // BITS]
    _made(index, free_name(graph, f"{matrix.weight}/Cast"), ir.DataType.INT32, sizes)
    for node, size in ((number, wide), (scaled, wide), (whole, shape.tolist())):
        _made(node, free_name(graph, f"{matrix.weight}/{node.op_type}"), ir.DataType.FLOAT, size)
    graph.insert_after(index, [number, scaled, whole])
    for node in matrix.nodes:
        node.replace_input_with(1, whole.outputs[0])
    plain = [node for node in matrix.nodes if len(stored) == 2 and not integer(node, "transB")]
    if plain:
        turned = ir.Node("", "Transpose", whole.outputs, [ir.AttrInt64s("perm", [1, 0])], num_outputs=1)
        graph.insert_after(
            whole,
            _made(turned, free_name(graph, f"{matrix.weight}/Transpose"), ir.DataType.FLOAT, shape.tolist()[::-1]),
        )
        for node in plain:
            node.replace_input_with(1, turned.outputs[0])
    swept(graph, weight)


def _made(node: ir.Node, name: str, kind: ir.DataType, shape: Iterable[int]) -> ir.Node:
    """Set the name of a node and the name, type and shape of its output; return the node."""
    value = node.outputs[0]
    node.name = value.name = name
    value.type, value.shape = ir.TensorType(kind), ir.Shape([int(size) for size in shape])
    return node


def _pairs(graph: ir.Graph) -> ir.Value:
    """Return the table of the numbers in a byte (256, 2), the same for all weights."""
    if PAIRS in graph.initializers:
        return graph.initializers[PAIRS]
    return constant(graph, pairs_of_a_byte(), PAIRS)
