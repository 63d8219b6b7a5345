"""Find nodes whose numbers decide how large other tensors are, as the durations of sounds decide the length of a voice.

One number more or less moves everything after it, so layers that lead there keep their channels: no fit makes up for a
wrong length, and no loss can compare two results of different lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from onnxgrail.graph.attributes import input_of
from onnxgrail.graph.cost.counting import PRODUCTS
from onnxgrail.graph.trace.facts import Facts, key
from onnxgrail.graph.trace.sizes import SOURCES

DECIDES = "its numbers decide the length of what later layers read"
LENGTHS: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,), "Expand": (1,), "Range": (0, 1, 2), "Tile": (1,),
}  # fmt: skip
"""Operands that say how large an output is."""


def deciding(model: ir.Model, facts: Facts) -> frozenset[str]:
    """Return the keys of the nodes that decide the length of a tensor that a layer reads, and of all before them.

    Sizes that are computed from sizes alone decide nothing of that kind, and neither do lists (`NonMaxSuppression`)
    and routings (`NonZero`).
    """
    found: set[str] = set()
    for node in model.graph:
        for operand in LENGTHS.get(node.op_type, ()):
            value = input_of(node, operand)
            if value is None or value.name in facts.constants or not _leads_to_layers(node):
                continue
            before = {key(one): one for one in _before(value, facts)}
            if any(one.op_type in PRODUCTS for one in before.values()):
                found |= before.keys()
    return frozenset(found)


def _before(value: ir.Value, facts: Facts) -> Iterator[ir.Node]:
    """Yield the nodes from which a value is computed; the size of a tensor does not depend on what computes it."""
    waiting, seen = [value], set[ir.Node]()
    while waiting:
        node = waiting.pop().producer()
        if node is None or node in seen or node.op_type in SOURCES or key(node) in facts.constants:
            continue
        seen.add(node)
        yield node
        waiting += [one for one in node.inputs if one is not None]


def _leads_to_layers(node: ir.Node) -> bool:
    """Return True if some layer depends on the outputs of a node."""
    waiting, seen = [node], {node}
    while waiting:
        for after in waiting.pop().successors():
            if after.op_type in PRODUCTS:
                return True
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return False
