"""Constants that Expand or Tile repeats to a size computed at run time, such as a per-head bias for each sample.

They have no labels at first: a position embedding has no channels of its own.  Marks that meet them along an axis on
which they are not repeated claim them like any constant: the constant is cut before the node that repeats it.
"""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.attributes import given
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.flow import Site
from onnxgrail.graph.trace.labels import Mark

REPEATS = frozenset({"Expand", "Tile"})
COPIES = REPEATS | {"Identity", "Cast"}


def claim(site: Site, operand: int, mark: Mark) -> bool:
    """Give a repeated constant the labels that it meets.

    Returns:
        False if the operand is not a repeated constant, or was already read without labels.
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
        offset = len(after) - len(before)
        spanned = [a for a in mark.axes if a >= offset and before[a - offset] == after[a]]
        readers = [n for n in made.consumers() if n.op_type != "Shape"]
        early = any(n.graph is not node.graph or key(n) in site.flow.seen - own for n in readers)
        taken = any(set(m.axes) & set(mark.axes) for m in marks.get(made.name or "", ()))
        if early or taken or len(spanned) != len(mark.axes) or made.is_graph_output():
            return False
        steps.append((made.name or "", mark))
        mark = Mark(tuple(a - offset for a in mark.axes), mark.labels)
    for name, found in steps:
        marks[name] = (*marks.get(name, ()), found)
    Site(site.flow, nodes[-1], site.version).carry(0, mark)
    return True


def chain(site: Site, operand: int) -> list[ir.Node]:
    """Return the nodes from an operand back to the constant that it repeats; empty for other operands."""
    value = site.node.inputs[operand]
    found: list[ir.Node] = []
    while value is not None and value.name not in site.flow.facts.constants:
        node = value.producer()
        if node is None or node.domain or node.op_type not in COPIES:
            return []
        found.append(node)
        value = node.inputs[0]
    return found if value is not None and any(node.op_type in REPEATS for node in found) else []
