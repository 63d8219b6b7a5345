"""Store the matrices of products as `MatMulNBits`, and tables of rows as `GatherBlockQuantized`.

A head that is tied to a table reads the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Grid, Rounded
from onnxgrail.graph.attributes import MICROSOFT, maker_of, number
from onnxgrail.graph.fittable.matrices import LINEAR, WEIGHTED, Matrix, Table, refusal, swept
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import free_name
from onnxgrail.graph.stored.packed import BYTE, packed_bits
from onnxgrail.graph.trace.facts import key

LEAST = 16  # weights of the smallest block
HEAD = 0.02  # most of the numbers in matrices that a matrix before an output may hold to get 8 bits
FIELDS, NAMES = 160, 4  # bytes of a node of few bits and its tensors, and how often they repeat the name of its weight


def stored_bytes(inputs: int, outputs: int, grid: Grid) -> int:
    """Return the bytes of a matrix as `MatMulNBits` stores it."""
    blocks = grid.blocks(inputs)
    zeros = 0 if grid.symmetric else -(-blocks * grid.bits // BYTE)
    return outputs * (blocks * (grid.size * grid.bits // BYTE + grid.dtype.itemsize) + zeros)


def least_padding(inputs: int, outputs: int, grid: Grid) -> Grid:
    """Return a form with smaller blocks if that takes less: the kernel pads the last block."""
    while grid.size > LEAST:
        half = replace(grid, size=grid.size // 2)
        if stored_bytes(inputs, outputs, half) >= stored_bytes(inputs, outputs, grid):
            break
        grid = half
    return grid


def pack(graph: ir.Graph, matrix: Matrix, rounded: Rounded, accuracy: int) -> None:
    """Replace the products with a matrix by `MatMulNBits`; a bias of Gemm is added by a node of its own.

    Args:
        graph: changed in place.
        matrix: the matrix; its weight is removed.
        rounded: its numbers.
        accuracy: the attribute `accuracy_level`.
    """
    weight = graph.initializers[matrix.weight]
    grid, (inputs, outputs) = rounded.grid, rounded.codes.shape
    padded = np.zeros((len(rounded.scale) * grid.size, outputs), np.uint8)
    padded[:inputs] = rounded.codes
    blocks = np.moveaxis(padded.reshape(-1, grid.size, outputs), -1, 0)
    parts = {"q": packed_bits(blocks, grid.bits)}
    scales: dict[float, ir.Value] = {}
    if not grid.symmetric:
        parts["zero"] = packed_bits(np.ascontiguousarray(rounded.zero.T), grid.bits)
    made = {n: constant(graph, a, f"{matrix.weight}/{n}{grid.bits}", old=weight) for n, a in parts.items()}
    for node in matrix.nodes:
        factor = number(node, "alpha", 1.0)
        if factor not in scales:
            scale = (rounded.scale.T * factor).astype(grid.dtype)
            scales[factor] = constant(graph, np.ascontiguousarray(scale), f"{matrix.weight}/scale", old=weight)
        weights = [made["q"], scales[factor], *([] if grid.symmetric else [made["zero"]])]
        multiply(graph, node, weights, rounded, accuracy)
    swept(graph, weight)


def multiply(graph: ir.Graph, node: ir.Node, weights: Sequence[ir.Value], rounded: Rounded, accuracy: int) -> None:
    """Turn a product into a `MatMulNBits`; a bias of Gemm is added by the node, and a new one multiplies.

    Args:
        graph: changed in place.
        node: the product.
        weights: packed codes, scales and zero points.
        rounded: their numbers.
        accuracy: the attribute `accuracy_level`.
    """
    (inputs, outputs), grid = rounded.codes.shape, rounded.grid
    fields = {"K": inputs, "N": outputs, "bits": grid.bits, "block_size": grid.size, "accuracy_level": accuracy}
    node = _product(graph, node)
    become(node, "MatMulNBits", fields, dict(enumerate(weights, 1)))


def become(node: ir.Node, op: str, fields: Mapping[str, int], constants: Mapping[int, ir.Value]) -> None:
    """Turn a node into an operator of ONNX Runtime with integer attributes and constant inputs by place."""
    node.domain, node.op_type = MICROSOFT, op
    node.attributes.clear()
    node.attributes.update({name: ir.AttrInt64(name, value) for name, value in fields.items()})
    node.resize_inputs(max(constants) + 1)
    for place, value in constants.items():
        node.replace_input_with(place, value)


def first(graph: ir.Graph, node: ir.Node) -> None:
    """Insert a node that reads constants only, as early as possible."""
    maker = maker_of(node, 0)
    if maker is None:
        graph.insert_before(graph[0], node)
    else:  # constants that are nodes are inserted at the beginning: the first one of several comes last
        graph.insert_after(maker, node)


def _product(graph: ir.Graph, node: ir.Node) -> ir.Node:
    """Return the node that is to multiply: the node itself, or a new one before a Gemm, which becomes an Add."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return node
    name = free_name(graph, f"{key(node)}/product")
    made = ir.Node(MICROSOFT, "MatMulNBits", list(node.inputs[:2]), num_outputs=1, name=name)
    made.metadata_props.update(node.metadata_props)
    made.outputs[0].name = name
    made.outputs[0].type, made.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    graph.insert_before(node, made)
    bias = node.inputs[2]
    node.domain, node.op_type = "", "Add"
    node.attributes.clear()
    node.resize_inputs(2)
    node.replace_input_with(0, made.outputs[0])
    node.replace_input_with(1, bias)
    return made


def name_bytes(weight: str) -> int:
    """Return the bytes of names, shapes and attributes that a weight needs in a few bits, besides its numbers."""
    return FIELDS + NAMES * len(weight)


def small_heads(known: Mapping[ir.Node, Matrix]) -> set[str]:
    """Return the matrices that compute outputs of the model and hold few of the numbers: 8 bits cost next to nothing.

    No layer makes up for their errors.
    """
    total = sum(matrix.inputs * matrix.outputs for matrix in dict.fromkeys(known.values()))
    found = set()
    for node, matrix in known.items():
        ends = [node.outputs[0], *(use.node.outputs[0] for use in node.outputs[0].uses() if use.node.op_type == "Add")]
        if matrix.inputs * matrix.outputs <= HEAD * total and any(value.is_graph_output() for value in ends):
            found.add(matrix.weight)
    return found


def unpackable(model: ir.Model, known: Mapping[ir.Node, Matrix], fixed: Collection[str]) -> dict[ir.Node, str]:
    """Return the nodes with constant weights that cannot be stored in a few bits, with the reason."""
    found = {}
    for node in model.graph:
        if node in known and node.op_type == "Gemm" and number(node, "beta", 1.0) != 1.0:
            found[node] = "its bias has a factor"
        elif node in known or not any(v is not None and v.name in fixed for v in node.inputs):
            continue
        elif node.op_type in LINEAR:
            one = refusal(node, known, fixed)
            found |= {} if one is None else {node: one.reason}
        elif node.op_type in WEIGHTED:
            found[node] = f"{node.op_type} has no form with a few bits per weight"
    return found


def stored_table_bytes(rows: int, columns: int, grid: Grid) -> int:
    """Return the bytes of a table as `GatherBlockQuantized` stores it."""
    blocks = grid.blocks(columns)
    zeros = 0 if grid.symmetric else -(-blocks * grid.bits // BYTE)
    return rows * (-(-columns * grid.bits // BYTE) + blocks * grid.dtype.itemsize + zeros)


def pack_table(graph: ir.Graph, table: Table, rounded: Rounded, accuracy: int) -> None:
    """Replace the lookups of a table, and the products with its transpose.

    Args:
        graph: changed in place.
        table: the table; its weight is removed. If products read it, its columns divide into blocks.
        rounded: its transpose.
        accuracy: the attribute `accuracy_level` of products.
    """
    weight, grid = graph.initializers[table.weight], rounded.grid
    arrays = {"q": packed_bits(rounded.codes.T, grid.bits), "scale": rounded.scale.T}
    if not grid.symmetric:
        arrays["zero"] = packed_bits(rounded.zero.T, grid.bits)
    parts = [constant(graph, array, f"{table.weight}/{name}", old=weight) for name, array in arrays.items()]
    fields = {"bits": grid.bits, "block_size": grid.size, "gather_axis": 0, "quantize_axis": 1}
    for node in table.lookups:
        become(node, "GatherBlockQuantized", fields, dict(zip((0, 2, 3), parts, strict=False)))
    if table.products:
        blocks = _blocks(graph, table, parts[0], rounded)
        for node in table.products:
            multiply(graph, node, [blocks, *parts[1:]], rounded, accuracy)
    swept(graph, weight)


def _blocks(graph: ir.Graph, table: Table, codes: ir.Value, rounded: Rounded) -> ir.Value:
    """Return the codes of a table as a product reads them, (rows, blocks, bytes)."""
    (_, rows), size = rounded.codes.shape, rounded.grid.size
    shape = (rows, len(rounded.scale), size * rounded.grid.bits // BYTE)
    target = constant(graph, np.array(shape, np.int64), f"{table.weight}/blocks")
    name = free_name(graph, f"{table.weight}/product")
    node = ir.Node("", "Reshape", [codes, target], num_outputs=1, name=name)
    node.outputs[0].name = name
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.UINT8), ir.Shape(shape)
    first(graph, node)
    return node.outputs[0]
