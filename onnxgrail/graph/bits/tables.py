"""Store tables of rows in 4 or 8 bits as `GatherBlockQuantized`; a tied head reads the same bytes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Grid, Rounded
from onnxgrail.graph.bits.matrices import become, first, multiply
from onnxgrail.graph.fittable.matrices import swept
from onnxgrail.graph.fittable.tables import Table
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import free_name
from onnxgrail.graph.stored.packed import BYTE, packed_bits


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
