"""Store weights in a few bits with standard operators: `DequantizeLinear` in blocks, of opset 21."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Rounded
from onnxgrail.graph.attributes import integer, numbers_of
from onnxgrail.graph.bits.matrices import first
from onnxgrail.graph.fittable.matrices import Matrix, Table, swept
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import free_name

OPSET = 21  # the first with blocks and with 4 bits
CHANNELS = 13  # the first with a scale per channel
HALF = 19  # the first with scales in half precision
TYPES: Mapping[tuple[int, bool], ir.DataType] = {
    (4, False): ir.DataType.UINT4,
    (4, True): ir.DataType.INT4,
    (8, False): ir.DataType.UINT8,
    (8, True): ir.DataType.INT8,
}  # by bits and symmetry: symmetric codes are signed and have no zero points


def dequantize_matrix(graph: ir.Graph, matrix: Matrix, rounded: Rounded) -> None:
    """Store a matrix in a few bits; its products stay.

    Args:
        graph: changed in place.
        matrix: the matrix, whose inputs divide into blocks; its weight is removed.
        rounded: its numbers.
    """
    weight = graph.initializers[matrix.weight]
    for turned in {bool(integer(node, "transB")) for node in matrix.nodes}:
        parts = _parts(graph, matrix.weight, rounded, turned=turned)
        fields = {"axis": int(turned), "block_size": rounded.grid.size}
        if len(rounded.scale) == 1:  # one scale per output: a form that needs no blocks
            parts, fields = [parts[0], *(_flat(part) for part in parts[1:])], {"axis": int(not turned)}
        value = _dequantized(graph, parts, fields)
        for node in matrix.nodes:
            if bool(integer(node, "transB")) == turned:
                node.replace_input_with(1, value)
    swept(graph, weight)


def dequantize_table(graph: ir.Graph, table: Table, rounded: Rounded) -> None:
    """Store a table as int8 with a scale per row: lookups take rows of both and multiply.

    A lookup in the output of a `DequantizeLinear` would convert the whole table in each run of ONNX Runtime.

    Args:
        graph: changed in place.
        table: the table; its weight is removed.
        rounded: its transpose, symmetric, with one block per row.
    """
    weight = graph.initializers[table.weight]
    codes, scale = _parts(graph, table.weight, rounded, turned=True)
    for node in table.lookups:
        taken = [_added(graph, node, "Gather", [part, node.inputs[1]], part.type) for part in (codes, scale)]
        number = _added(graph, node, "Cast", taken[:1], scale.type)
        node.op_type = "Mul"
        node.attributes.clear()
        node.replace_input_with(0, number)
        node.replace_input_with(1, taken[1])
    if table.products:
        order = {node: place for place, node in enumerate(graph)}
        users = sorted(weight.uses(), key=lambda use: order[use.node])
        number = _added(graph, users[0].node, "Cast", [codes], scale.type)
        value = _added(graph, users[0].node, "Mul", [number, scale], scale.type)
        value.shape = codes.shape
        for use in users:
            use.node.replace_input_with(use.idx, value)
    swept(graph, weight)


def _added(
    graph: ir.Graph, before: ir.Node, op: str, inputs: Sequence[ir.Value | None], kind: ir.TypeProtocol | None
) -> ir.Value:
    """Insert a node; return its output. A Cast converts to its type, a Gather has the attributes of `before`."""
    name = free_name(graph, f"{before.outputs[0].name}/{op}")
    fields = list(before.attributes.values()) if op == "Gather" else []
    if op == "Cast" and kind is not None:
        fields = [ir.AttrInt64("to", int(kind.dtype))]
    node = ir.Node("", op, list(inputs), fields, name=name)
    node.outputs[0].name, node.outputs[0].type = name, kind
    graph.insert_before(before, node)
    return node.outputs[0]


def _parts(graph: ir.Graph, name: str, rounded: Rounded, *, turned: bool) -> list[ir.Value]:
    """Return codes, scales and zero points as constants, transposed if `turned`."""
    grid, weight = rounded.grid, graph.initializers[name]
    dtype = TYPES[grid.bits, grid.symmetric].numpy()
    middle = grid.middle if grid.symmetric else 0
    arrays: dict[str, Array] = {
        "q": (rounded.codes.astype(np.int16) - middle).astype(np.int8 if middle else np.uint8).astype(dtype),
        "scale": rounded.scale,
    }
    if not grid.symmetric:
        arrays["zero"] = rounded.zero.astype(dtype)
    return [constant(graph, a.T if turned else a, f"{name}/{n}", old=weight) for n, a in arrays.items()]


def _flat(value: ir.Value) -> ir.Value:
    """Return a constant with one axis instead of two."""
    flat = numbers_of(value).reshape(-1)
    value.const_value, value.shape = ir.tensor(flat, name=value.name), ir.Shape(flat.shape)
    return value


def _dequantized(graph: ir.Graph, parts: Sequence[ir.Value], fields: Mapping[str, int]) -> ir.Value:
    """Insert the node that dequantizes a constant; return its output."""
    name = free_name(graph, f"{parts[0].name}/float")
    node = ir.Node("", "DequantizeLinear", list(parts), [ir.AttrInt64(n, v) for n, v in fields.items()], name=name)
    value = node.outputs[0]
    value.name, value.type, value.shape = name, parts[1].type, parts[0].shape
    first(graph, node)
    return value
