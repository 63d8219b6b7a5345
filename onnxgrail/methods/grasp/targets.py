"""The matrices of the chosen layers that are replaced, grouped by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.algebra.fit.lowrank import rank_of, saving
from onnxgrail.core import Recipe, Refusal
from onnxgrail.graph.cuts.residual import Layer
from onnxgrail.graph.fittable.matrices import Matrix
from onnxgrail.graph.trace.facts import key
from onnxgrail.methods.grasp.choice import Candidates, Chosen, sharing


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Matrices of a layer, with the layer's first node; None for a matrix outside all layers."""

    begin: ir.Node | None
    matrices: Sequence[Matrix]


def rank(matrix: Matrix, recipe: Recipe) -> int:
    """Return the number of kept directions of a matrix."""
    return rank_of(matrix.inputs, matrix.outputs, recipe.grasp_retain)


def targets_of(found: Candidates, chosen: Chosen, recipe: Recipe) -> tuple[dict[str, Matrix], list[Refusal]]:
    """Return matrices by weight, each once, and the reasons why other matrices of the chosen layers stay."""
    refusals = [r for name in chosen.matrices for r in found.refusals[name]]
    targets = {m.weight: m for some in chosen.matrices.values() for m in some}
    for matrix, other in sharing(found, chosen):
        del targets[matrix.weight]
        refusals.append(_refusal(matrix, f"its weight is shared with {other}, which stays"))
    for matrix in list(targets.values()):
        if saving(matrix.inputs, matrix.outputs, rank(matrix, recipe)) <= 0:
            del targets[matrix.weight]
            refusals.append(_refusal(matrix, "a pair of rank 1 would be no smaller"))
    return targets, refusals


def groups_of(slim: ir.Model, targets: Mapping[str, Matrix], chosen: Chosen, every: Sequence[Layer]) -> list[Group]:
    """Group matrices by layer in the order of the network, each with the layer's first node.

    Matrices outside all layers are groups of their own, between the others.
    """
    order = {node: place for place, node in enumerate(slim.graph)}
    first = {layer.name: layer.nodes[0] for layer in every}
    groups: list[tuple[int, ir.Node | None, list[Matrix]]] = []
    seen: set[str] = set()
    for name, some in chosen.matrices.items():
        mine = [m for m in some if m.weight in targets and m.weight not in seen]
        seen.update(m.weight for m in mine)
        mine.sort(key=lambda m: min(order[n] for n in m.nodes))
        parts = [mine] if name in first else [[m] for m in mine]
        groups += [(min(order[n] for n in part[0].nodes), first.get(name), part) for part in parts if part]
    return [Group(begin, part) for _, begin, part in sorted(groups, key=lambda g: g[0])]


def _refusal(matrix: Matrix, reason: str) -> Refusal:
    node = matrix.nodes[0]
    return Refusal(value=matrix.weight, node=node.name or key(node), op=node.op_type, reason=reason)
