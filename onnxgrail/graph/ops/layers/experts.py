"""Matrices gathered at run time from a stack of weights, as in a mixture of experts.

All matrices of a stack share their two widths, so a position is removed from all of them: one block per layer.  The
gathered matrices are followed to the product that contracts them, which consumes their channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxgrail.graph.attributes import integers, name_of
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

CHOSEN = "each position of this axis is multiplied with a matrix of its own"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Matrices gathered from a stack.

    Attributes:
        gather: key of the gathering node.
        axes: for every axis the axis of the stack; None for the axes of the choice.
    """

    gather: str
    axes: tuple[int | None, ...]


def stack(site: Site) -> None:
    """Produce both widths of a stack of three axes, gathered along the first; a product may consume one later."""
    rank = len(site.out_shape())
    marks = []
    for axis in (1, 2):
        labels = site.weight(0, axis)
        site.carry(0, Mark((axis,), labels), "producer")
        marks.append(Mark((rank - 3 + axis,), labels))
    site.emit(marks)


def chosen(site: Site, operand: int) -> Chosen | None:
    """Return the stack that an operand was gathered from, seen through copies, transpositions and reshapes."""
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
    """Return, for every axis of a copy, the axis of the node's input; None for nodes that do not copy."""
    if node.op_type not in ("Identity", "Cast", "Transpose", "Squeeze", "Unsqueeze", "Reshape"):
        return None
    before, after = (site.flow.facts.shapes[name] for name in (name_of(node, 0), key(node)))
    rank, shift = len(after), len(before) - len(after)
    if node.op_type == "Transpose":
        return integers(node, "perm", range(rank)[::-1])
    kept = rank if before == after else 2 if before[-2:] == after[-2:] else 0
    return [a + shift if a >= rank - kept else None for a in range(rank)]


def consume(site: Site, found: Chosen, axis: int, source: tuple[str, int]) -> None:
    """Change a stack's use: it consumes `source` through its `axis` instead of producing it."""
    uses = site.flow.uses
    for position, use in enumerate(uses):
        if (use.node, use.operand, use.mark.axes) == (found.gather, 0, (axis,)):
            if use.role == "producer":
                uses[position] = replace(use, role="consumer", source=source)
            else:
                uses.append(replace(use, source=source))
            return
