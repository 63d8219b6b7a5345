"""How channels pass through each op.  A file per family; importing this package registers them all."""

from onnxgrail.graph.ops import (
    attention,
    attention_ms,
    conv,
    einsum,
    fused,
    join,
    layout,
    linear,
    pointwise,
    quantised,
    reduce,
    shapes,
)

__all__ = [
    "attention",
    "attention_ms",
    "conv",
    "einsum",
    "fused",
    "join",
    "layout",
    "linear",
    "pointwise",
    "quantised",
    "reduce",
    "shapes",
]
