"""Decide if an activation that was computed earlier is still valid after more decisions."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Bools, Ints
from onnxgrail.graph.trace.facts import bodies, key
from onnxgrail.graph.trace.sizes import SOURCES
from onnxgrail.graph.trace.survey import Ledger, Survey

Cone = tuple[ir.Node, ...]
"""The nodes that compute a tensor from other tensors."""


def cone(value: ir.Value, inputs: Collection[str]) -> Cone:
    """Return the nodes that compute `value` from `inputs`."""
    found: dict[ir.Node, None] = {}
    queue = [value]
    while queue:
        wanted = queue.pop()
        node = wanted.producer()
        if node is None or node in found or wanted.name in inputs:
            continue
        found[node] = None
        queue += [v for v in node.inputs if v is not None]
    return tuple(found)


def holds(made: Cone, survey: Survey, before: Ledger, after: Ledger) -> bool:
    """Return True if a tensor computed under `before` equals the one under `after`, except for removed channels.

    That is so if no weight has new values, and every node passes on the channels removed since, without summing over
    them.  Nodes with bodies always count as changed.

    Args:
        made: the nodes that compute the tensor.
        survey: the traced model.
        before: decisions when it was computed.
        after: decisions now.
    """
    gone = after.dead & ~before.dead
    if (before.dead & ~after.dead).any():
        return False
    return not any(bodies(node) or _altered(node, survey, before, after, gone) for node in made)


def _altered(node: ir.Node, survey: Survey, before: Ledger, after: Ledger, gone: Bools) -> bool:
    if node.op_type in SOURCES:  # their readers are corrected by the rewrite
        return False
    name = key(node)
    if before.shifts.get(name) is not after.shifts.get(name):
        return True
    read: list[Ints] = []
    for position, value in enumerate(node.inputs):
        operand = survey.operands.get((name, position))
        if operand is not None:
            if before.arrays.get(operand.param) is not after.arrays.get(operand.param):
                return True
            read += operand.units.values()
        elif value is not None:
            read += [mark.labels for mark in survey.marks.get(value.name or "", ())]
    lost = {unit for labels in read for unit in np.unique(labels[gone[labels]]).tolist()}
    if not lost:
        return False
    handed = [mark.labels for v in node.outputs for mark in survey.marks.get(v.name or "", ())]
    return not lost <= {unit for labels in handed for unit in np.unique(labels).tolist()}
