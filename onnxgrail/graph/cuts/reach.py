"""Whether an activation that was computed once still holds after more decisions, but for channels that went."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Bools, Ints
from onnxgrail.graph.trace.facts import bodies, key
from onnxgrail.graph.trace.sizes import SOURCES
from onnxgrail.graph.trace.survey import Ledger, Survey

Cone = tuple[ir.Node, ...]
"""The nodes that make a tensor from others."""


def cone(value: ir.Value, inputs: Collection[str]) -> Cone:
    """Nodes that a run from `inputs` to `value` goes through."""
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
    """Whether what these nodes made under `before` is what they make under `after`, once lost channels are taken out.

    It is where no weight got new values, and every channel that went since is one that its node hands on and does not
    sum over.  A node with a body is not looked into.
    """
    gone = after.dead & ~before.dead
    if (before.dead & ~after.dead).any():
        return False
    return not any(bodies(node) or _altered(node, survey, before, after, gone) for node in made)


def _altered(node: ir.Node, survey: Survey, before: Ledger, after: Ledger, gone: Bools) -> bool:
    if node.op_type in SOURCES:  # what they tell of sizes is what the narrowed graph is made to fit
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
