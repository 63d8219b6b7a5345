"""The table of all operators: from (domain, name) to a function of the node's call and its operands."""

from __future__ import annotations

from onnxgrail.graph.attributes import MICROSOFT
from onnxgrail.torchgraph.call import Function
from onnxgrail.torchgraph.ops import (
    attention,
    attention_ms,
    conv,
    fused,
    layout,
    linear,
    norm,
    pick,
    pointwise,
    pool,
    quantised,
    reduce,
    resize,
    shapes,
)

STANDARD = (pointwise, linear, conv, norm, pool, resize, reduce, layout, shapes, pick, quantised, attention)
FUSED = (fused, attention_ms)

OPS: dict[tuple[str, str], Function] = {
    **{("", name): function for room in STANDARD for name, function in room.TABLE.items()},
    **{(MICROSOFT, name): function for room in FUSED for name, function in room.TABLE.items()},
}
# ONNX Runtime writes this operator into the standard domain.
OPS["", "SimplifiedLayerNormalization"] = norm.TABLE["RMSNormalization"]


def find(domain: str, op: str) -> Function | None:
    """Return the function of an operator; None if it is not implemented."""
    return OPS.get((domain, op))
