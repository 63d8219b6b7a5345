"""Round weights to nearest and store them, and report on weights in a few bits."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.algebra.rounding.grid import nearest
from onnxgrail.core import Grid, Recipe
from onnxgrail.graph.bits.plan import Plan
from onnxgrail.graph.bits.store import store, store_table
from onnxgrail.graph.fittable.matrices import Matrix, Table, array_of
from onnxgrail.graph.trace.facts import key


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The report entry of one matrix.

    Attributes:
        weight: its name; nodes: that multiply by it.
        bits, block_size: its form.
        rounding: `carried` if each error is made up for by the inputs rounded later, `nearest` if not.
        before, after: squared error of its outputs as a share of their energy: rounded to nearest, and as written; None
            if its inputs were not measured, with the reason.
    """

    weight: str
    nodes: tuple[str, ...]
    bits: int
    block_size: int
    rounding: str
    before: float | None = None
    after: float | None = None
    reason: str = ""


def nearest_matrix(graph: ir.Graph, matrix: Matrix, grid: Grid, plan: Plan, recipe: Recipe, why: str) -> Entry:
    """Round a matrix of a plan to nearest for a reason, store it, and return its report entry."""
    said = entry(matrix.weight, matrix.nodes, grid, "nearest", reason=why)
    store(graph, matrix, nearest(array_of(matrix, graph), grid), plan, recipe)
    return said


def nearest_table(graph: ir.Graph, table: Table, grid: Grid, recipe: Recipe) -> Entry:
    """Round a table to nearest, store it, and return its report entry."""
    said = entry(
        table.weight, (*table.lookups, *table.products), grid, rounding="nearest", reason="its rows are looked up"
    )
    store_table(graph, table, nearest(table.array(graph).T, grid), recipe)
    return said


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
