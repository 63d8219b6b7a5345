"""Write rounded weights into a graph, in the form that the recipe asks for."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.algebra.rounding.grid import nearest
from onnxgrail.core import Grid, Recipe, Rounded
from onnxgrail.finishing.bits.entry import Entry
from onnxgrail.graph.fittable.matrices import Matrix, array_of
from onnxgrail.graph.fittable.tables import Table
from onnxgrail.graph.rewrite.bits import MICROSOFT, pack
from onnxgrail.graph.rewrite.dequantize import dequantize_matrix, dequantize_table
from onnxgrail.graph.rewrite.tables import pack_table
from onnxgrail.graph.trace.facts import key

TYPES_OF_FOUR_BITS = 10  # the IR version that has them


def store(graph: ir.Graph, matrix: Matrix, rounded: Rounded, recipe: Recipe) -> None:
    """Store a rounded matrix."""
    if recipe.qdq:
        dequantize_matrix(graph, matrix, rounded)
    else:
        pack(graph, matrix, rounded, recipe.accuracy_level)


def store_nearest(graph: ir.Graph, matrix: Matrix, grid: Grid, recipe: Recipe, why: str) -> Entry:
    """Round a matrix to nearest for a reason, store it, and return its report entry."""
    said = entry(matrix.weight, matrix.nodes, grid, "nearest", reason=why)
    store(graph, matrix, nearest(array_of(matrix, graph), grid), recipe)
    return said


def store_table(graph: ir.Graph, table: Table, grid: Grid, recipe: Recipe) -> Entry:
    """Round a table to nearest, store it, and return its report entry."""
    said = entry(
        table.weight, (*table.lookups, *table.products), grid, rounding="nearest", reason="its rows are looked up"
    )
    rounded = nearest(table.array(graph).T, grid)
    if recipe.qdq:
        dequantize_table(graph, table, rounded)
    else:
        pack_table(graph, table, rounded, recipe.accuracy_level)
    return said


def declare(model: ir.Model, recipe: Recipe) -> None:
    """Declare what the stored form needs: the domain of its operators, or types of four bits."""
    if recipe.qdq:
        model.ir_version = max(model.ir_version, TYPES_OF_FOUR_BITS)
    else:
        model.opset_imports.setdefault(MICROSOFT, 1)


def entry(
    weight: str,
    nodes: tuple[ir.Node, ...],
    grid: Grid,
    rounding: str,
    errors: tuple[float | None, float | None] = (None, None),
    reason: str = "",
) -> Entry:
    """Return the report entry of a weight."""
    return Entry(
        weight=weight,
        nodes=tuple(node.name or key(node) for node in nodes),
        bits=grid.bits,
        block_size=grid.size,
        rounding=rounding,
        before=errors[0],
        after=errors[1],
        reason=reason,
    )
