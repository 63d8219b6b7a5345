"""Change the basis of channels inside attention heads without changing the function of the model.

Any invertible matrix may stand between values and what reads them, and between queries and keys. Queries and keys that
are rotated by position keep their basis, and get an order in which channels are picked.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Floats, Ints
from onnxgrail.graph import slots
from onnxgrail.graph.rewrite.assign import set_operands
from onnxgrail.graph.rewrite.sweep import sweep
from onnxgrail.graph.rotate import norms
from onnxgrail.graph.rotate.inside import Inside, Part
from onnxgrail.graph.rotate.marked import FUSED, INSIDE, MARK, ORDER, PICKED, RANK
from onnxgrail.graph.trace.facts import Facts, constant_of


def rotate_heads(graph: ir.Graph, inside: Inside, basis: Floats, facts: Facts, captured: Collection[str]) -> None:
    """Change the basis of channels inside heads, or rank them, in place, and mark the product that reads them.

    Args:
        graph: changed in place.
        inside: the channels.
        basis: (groups, width, width) invertible matrices; their columns are the new channels. If units are picked,
            (units,) their numbers, the most important first.
        facts: of the graph.
        captured: names that bodies of nodes read.
    """
    marks = {RANK: inside.name} if inside.kind == "rank" else {MARK: inside.name, INSIDE: inside.kind}
    inside.node.metadata_props.update(marks)
    if inside.units is not None:
        first = [inside.units.tolist().index(unit) for unit in basis.astype(int).tolist()]
        inside.node.metadata_props[ORDER] = ",".join(map(str, first))
        for node, operand in inside.tables:
            node.metadata_props[PICKED] = str(operand)
        for norm in [norm for side in inside.norms for norm in side]:
            op = norm.nodes[-1].op_type
            dtype = facts.dtypes[norm.source.name or ""]
            norms.simplify(graph, norm, {**marks, FUSED: op} if op in norms.FUSED else marks, dtype)
        return
    inverse = np.swapaxes(np.linalg.inv(basis), 1, 2)
    for part in inside.parts:
        array = constant_of(part.value, part.value.name or "", facts)
        assert array is not None
        values = _changed(array.astype(np.float64), part.axis, part.index, inverse if part.inverse else basis)
        limit = slots.largest(array.dtype)
        values = np.clip(values, -limit, limit).astype(array.dtype)
        sweep(graph, set_operands(graph, [(part.node, part.operand)], values, captured))


def _changed(array: Floats, axis: int, index: Ints, basis: Floats) -> Floats:
    front = np.moveaxis(array, axis, 0)
    front[index] = np.einsum("gcd...,gde->gce...", front[index], basis)
    return array


def products_of(part: Part, facts: Facts) -> Floats:
    """Return the (groups, width, width) products of a weight's channels, summed over copies and all other axes."""
    array = constant_of(part.value, part.value.name or "", facts)
    assert array is not None
    rows = np.moveaxis(array, part.axis, 0).astype(np.float64)[part.index]
    flat = rows.reshape(*part.index.shape, -1)
    return np.asarray(np.einsum("gcdr,gcer->gde", flat, flat, optimize=True))
