"""Find convolutions whose filters are computed from a constant and an activation, as in StyleGAN."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.cost.counting import CONVOLUTIONS, PRODUCTS
from onnxgrail.graph.trace.facts import Facts, key

MODULATED = "modulated weights: the filters of {} are computed from a constant and an activation, which is not followed"
FILTERS = CONVOLUTIONS | {"ConvTranspose"}
RANK = 3  # a constant with at least this many axes counts as filters


def modulated(model: ir.Model, facts: Facts) -> dict[str, str]:
    """Return the keys of nodes that compute modulated filters, and of the convolutions, each with the reason."""
    found: dict[str, str] = {}
    for node in model.graph:
        weight = node.inputs[1] if node.op_type in FILTERS and len(node.inputs) > 1 else None
        if weight is None or weight.name in facts.constants:
            continue
        inside, filters = _made_of(weight, facts)
        if filters:
            why = MODULATED.format(f"{node.op_type} {node.name or key(node)}")
            found |= dict.fromkeys([*inside, key(node)], why)
    return found


def _made_of(weight: ir.Value, facts: Facts) -> tuple[list[str], bool]:
    """Return the nodes that compute a weight, up to the nearest layers upstream, and True if filters are among them."""
    inside: list[str] = []
    filters, queue = False, [weight]
    while queue:
        value = queue.pop()
        if value.name in facts.constants:
            filters |= len(facts.shapes.get(value.name or "", ())) >= RANK
            continue
        node = value.producer()
        if node is None or node.op_type in PRODUCTS or key(node) in inside:
            continue
        inside.append(key(node))
        queue += [v for v in node.inputs if v is not None]
    return inside, filters
