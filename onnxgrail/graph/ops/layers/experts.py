"""Matrices chosen at run time out of a stack of weights, as a mixture of experts does for every token.

All matrices of a stack share their two widths, so a position goes from all of them: one block per layer.  What is
chosen is a weight wherever it goes, and the product that contracts it is the one that consumes its channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxgrail.graph.attributes import integers
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

CHOSEN = "each position of this axis is multiplied with a matrix of its own"


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was gathered out of a stack: the node that did it, and for every axis that of the stack (None: chosen)."""

    gather: str
    axes: tuple[int | None, ...]


def stack(site: Site) -> None:
    """Both widths of a stack of three axes, gathered along the first, are produced until a product consumes one."""
    rank = len(site.out_shape())
    marks = []
    for axis in (1, 2):
        labels = site.weight(0, axis)
        site.carry(0, Mark((axis,), labels), "producer")
        marks.append(Mark((rank - 3 + axis,), labels))
    site.emit(marks)


def chosen(site: Site, operand: int) -> Chosen | None:
    """The stack behind an operand, seen through copies, transpositions and reshapes of what chooses."""
    value = site.node.inputs[operand]
    order: list[int | None] = list(range(len(site.shape(operand))))
    while value is not None and (node := value.producer()) is not None:
        name = key(node)
        if any((use.node, use.operand, use.mark.axes) == (name, 0, (2,)) for use in site.flow.uses):
            first = len(site.flow.facts.shapes[value.name or ""]) - 3
            gathered = node.op_type in ("Gather", "GatherND")
            axes = tuple(a - first if a is not None and a > first else None for a in order)
            return Chosen(name, axes) if gathered else None
        before = _before(site, node)
        if before is None:
            return None
        order = [before[a] if a is not None else None for a in order]
        value = node.inputs[0]
    return None


def _before(site: Site, node: ir.Node) -> Sequence[int | None] | None:
    """For every axis of a copy where it was in front of the node; None for other nodes."""
    if node.op_type not in ("Identity", "Cast", "Transpose", "Squeeze", "Unsqueeze", "Reshape"):
        return None
    source = node.inputs[0]
    shapes = site.flow.facts.shapes
    before, after = shapes[(source.name or "") if source is not None else ""], shapes[key(node)]
    rank, shift = len(after), len(before) - len(after)
    if node.op_type == "Transpose":
        return integers(node, "perm", range(rank)[::-1])
    kept = rank if before == after else 2 if before[-2:] == after[-2:] else 0
    return [a + shift if a >= rank - kept else None for a in range(rank)]


def consume(site: Site, found: Chosen, axis: int, source: tuple[str, int]) -> None:
    """The stack consumes `source` through its `axis`, instead of producing it."""
    uses = site.flow.uses
    for position, use in enumerate(uses):
        if (use.node, use.operand, use.mark.axes) == (found.gather, 0, (axis,)):
            if use.role == "producer":
                uses[position] = replace(use, role="consumer", source=source)
            else:
                uses.append(replace(use, source=source))
            return
