"""Constants that get a shape computed at run time: a bias per head for each sample, or one reshaped to fit a picture.

They have no labels at first: a position embedding has no channels of its own.  Marks that meet them along an axis on
which Expand or Tile does not repeat them claim them like any constant: the constant is cut before these nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrail.graph.attributes import given
from onnxgrail.graph.ops.tensors.layout import reshaped
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

REPEATS = frozenset({"Expand", "Tile"})
SHAPED = REPEATS | {"Reshape"}
COPIES = SHAPED | {"Identity", "Cast"}


def claim(site: Site, operand: int, mark: Mark) -> bool:
    """Give a constant that is repeated or reshaped the labels that it meets.

    Returns:
        False if the operand is no such constant, or was already read without labels.
    """
    nodes = chain(site, operand)
    if not nodes:
        return False
    facts, marks = site.flow.facts, site.flow.marks
    own = {site.key, *(key(node) for node in nodes)}
    steps: list[tuple[str, Mark]] = []
    for node in nodes:
        source, made = given(node, 0), node.outputs[0]
        before, after = facts.shapes[source.name or ""], facts.shapes[made.name or ""]
        earlier = _before(node, mark, before, after)
        readers = [n for n in made.consumers() if n.op_type != "Shape"]
        early = any(n.graph is not node.graph or key(n) in site.flow.seen - own for n in readers)
        taken = any(set(m.axes) & set(mark.axes) for m in marks.get(made.name or "", ()))
        if early or taken or earlier is None or made.is_graph_output():
            return False
        steps.append((made.name or "", mark))
        mark = earlier
    for name, found in steps:
        marks[name] = (*marks.get(name, ()), found)
    Site(site.flow, nodes[-1], site.version).carry(0, mark)
    return True


def _before(node: ir.Node, mark: Mark, before: Sequence[int], after: Sequence[int]) -> Mark | None:
    """Return a mark on the input of a node that copies a constant; None if the channels are not there one by one."""
    if node.op_type == "Reshape":
        found = reshaped(mark, after, before)
        return found if found.labels.size == mark.labels.size else None
    offset = len(after) - len(before)
    spanned = all(a >= offset and before[a - offset] == after[a] for a in mark.axes)
    return Mark(tuple(a - offset for a in mark.axes), mark.labels) if spanned else None


def chain(site: Site, operand: int) -> list[ir.Node]:
    """Return the nodes from an operand back to the constant that it copies; empty for other operands."""
    value = site.node.inputs[operand]
    found: list[ir.Node] = []
    while value is not None and value.name not in site.flow.facts.constants:
        node = value.producer()
        if node is None or node.domain or node.op_type not in COPIES:
            return []
        found.append(node)
        value = node.inputs[0]
    return found if value is not None and any(node.op_type in SHAPED for node in found) else []
