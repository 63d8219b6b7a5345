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


class Validity:
    """Finds out if tensors that were computed under earlier decisions are valid now; cones that overlap share work."""

    def __init__(self, survey: Survey, after: Ledger) -> None:
        self._survey, self._after = survey, after
        self._altered: dict[tuple[ir.Node, int], bool] = {}

    def holds(self, made: Cone, before: Ledger) -> bool:
        """Return True if a tensor computed under `before` equals the one under `after`, except for removed channels.

        That is so if no weight has new values, and every node passes on the channels removed since, without summing
        over them.  Nodes with bodies count as changed by any other decisions.

        Args:
            made: the nodes that compute the tensor.
            before: decisions when it was computed; must live as long as this instance.
        """
        after = self._after
        if before is after:
            return True
        if (before.dead & ~after.dead).any():
            return False
        gone = after.dead & ~before.dead
        for node in made:
            known = self._altered.get((node, id(before)))
            if known is None:
                known = bool(bodies(node)) or _altered(node, self._survey, before, after, gone)
                self._altered[node, id(before)] = known
            if known:
                return False
        return True


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
    lost = [labels[now] for labels in read if (now := gone[labels]).any()]
    if not lost:
        return False
    handed = [mark.labels for v in node.outputs for mark in survey.marks.get(v.name or "", ())]
    kept = np.zeros_like(gone)
    for labels in handed:
        kept[labels] = True
    return not all(kept[labels].all() for labels in lost)


def first_change(graph: ir.Graph, survey: Survey, ledger: Ledger) -> int:
    """Return the position of the first node that reads, computes or passes on something else under some decisions.

    Nodes with bodies always count as changed.
    """
    lost = {name for name, marks in survey.marks.items() if any(ledger.dead[mark.labels].any() for mark in marks)}
    for number, node in enumerate(graph):
        name = key(node)
        operands = [survey.operands.get((name, position)) for position in range(len(node.inputs))]
        new = any(o is not None and (o.param in ledger.arrays or o.changes(ledger.dead)) for o in operands)
        narrow = any(v is not None and v.name in lost for v in (*node.inputs, *node.outputs))
        if new or narrow or name in ledger.shifts or bodies(node):
            return number
    return len(graph)
