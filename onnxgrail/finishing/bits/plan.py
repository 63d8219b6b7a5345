"""Choose the weights that are stored in a few bits, with reasons for the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.runtime.quantize import WEIGHTS
from onnxgrail.core import Grid, Recipe, Refusal
from onnxgrail.errors import ModelError
from onnxgrail.graph.fittable.matrices import Matrix, array_of, matrices
from onnxgrail.graph.rewrite.bits import stored_bytes, unpackable
from onnxgrail.graph.trace.facts import Facts, key

TYPES = (np.float32, np.float16)  # that the kernels compute in
SMALLER = "it would not get smaller"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """The matrices to store in a few bits, in node order, each with its form, and the nodes that stay in float."""

    matrices: tuple[tuple[Matrix, Grid], ...]
    left: tuple[Refusal, ...]


def plan_of(model: ir.Model, facts: Facts, recipe: Recipe) -> Plan:
    """Choose the matrices that get smaller.

    Args:
        model: the graph whose nodes will be changed.
        facts: its shapes.
        recipe: kind, block size and symmetry.

    Raises:
        ModelError: a weight holds NaN or infinity.
    """
    known = matrices(model)
    left = unpackable(model, known, facts.constants)
    left |= {node: "its input has one axis" for node in known if _rank(node, facts) == 1}
    chosen = []
    for matrix in dict.fromkeys(known.values()):
        array = array_of(matrix, model.graph)
        form = Grid(
            bits=WEIGHTS[recipe.quantize], size=recipe.block_size, symmetric=recipe.symmetric, dtype=array.dtype
        )
        why = next((left[node] for node in matrix.nodes if node in left), "")
        if not why and array.dtype not in TYPES:
            why = f"no kernel computes in {array.dtype}"
        if not why and stored_bytes(matrix, form) >= array.nbytes:
            why = SMALLER
        if why:
            left |= {node: left.get(node, why) for node in matrix.nodes}
            continue
        if not np.isfinite(array).all():
            raise ModelError(f"the weight {matrix.weight} holds NaN or infinity", hint="Repair the model")
        chosen.append((matrix, form))
    places = {node: place for place, node in enumerate(model.graph)}
    refusals = [
        Refusal(
            value=_weight(node, facts), node=node.name or key(node), op=node.op_type, reason=why, position=places[node]
        )
        for node, why in sorted(left.items(), key=lambda item: places[item[0]])
    ]
    return Plan(matrices=tuple(chosen), left=tuple(refusals))


def _rank(node: ir.Node, facts: Facts) -> int | None:
    value = node.inputs[0]
    shape = facts.shapes.get(value.name or "") if value is not None else None
    return None if shape is None else len(shape)


def _weight(node: ir.Node, facts: Facts) -> str:
    """Return the name of a node's constant with the most axes."""
    found = [v.name or "" for v in node.inputs if v is not None and v.name in facts.constants]
    return max(found, key=lambda name: len(facts.shapes.get(name, ())), default="")
