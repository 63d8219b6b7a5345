"""Write rounded weights into a graph, in the form that the recipe asks for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Grid, Recipe, Rounded
from onnxgrail.graph.attributes import MICROSOFT
from onnxgrail.graph.bits.dequantize import dequantize_matrix, dequantize_table
from onnxgrail.graph.bits.matrices import pack, pack_table
from onnxgrail.graph.bits.plan import Plan
from onnxgrail.graph.bits.unpacked import unpack
from onnxgrail.graph.fittable.matrices import Matrix, Table
from onnxgrail.graph.rewrite.unique import names_kept

TYPES_OF_FOUR_BITS = 10  # the IR version that has them


def store(graph: ir.Graph, matrix: Matrix, rounded: Rounded, plan: Plan, recipe: Recipe) -> None:
    """Store a rounded matrix or convolution of a plan."""
    if any(one is matrix for one, _ in plan.unpacked):
        unpack(graph, matrix, rounded)
    elif recipe.qdq:
        dequantize_matrix(graph, matrix, rounded)
    else:
        pack(graph, matrix, rounded, recipe.accuracy_level)


def store_table(graph: ir.Graph, table: Table, rounded: Rounded, recipe: Recipe) -> None:
    """Store a rounded table."""
    if recipe.qdq:
        dequantize_table(graph, table, rounded)
    else:
        pack_table(graph, table, rounded, recipe.accuracy_level)


def store_blank(model: ir.Model, plan: Plan, recipe: Recipe) -> None:
    """Store all weights of a plan without their numbers, to learn the size of the file."""
    graph = model.graph
    with names_kept(graph):
        for matrix, grid in (*plan.matrices, *plan.unpacked):
            store(graph, matrix, _blank(matrix.inputs, matrix.outputs, grid), plan, recipe)
        for table, grid in plan.tables:
            rows, columns = table.array(graph).shape
            store_table(graph, table, _blank(columns, rows, grid), recipe)
    declare(model, plan, recipe)


def _blank(inputs: int, outputs: int, grid: Grid) -> Rounded:
    codes = np.zeros((inputs, outputs), np.uint8)
    scale = np.ones((grid.blocks(inputs), outputs), grid.dtype)
    return Rounded(codes, scale, np.zeros(scale.shape, np.uint8), grid)


def declare(model: ir.Model, plan: Plan, recipe: Recipe) -> None:
    """Declare what the stored form needs: the domain of its operators, or types of four bits."""
    if not plan.matrices and not plan.tables:
        return
    if not recipe.qdq:
        model.opset_imports.setdefault(MICROSOFT, 1)
    elif any(grid.bits == 4 for _, grid in (*plan.matrices, *plan.tables)):
        model.ir_version = max(model.ir_version, TYPES_OF_FOUR_BITS)
