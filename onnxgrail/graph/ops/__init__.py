"""How channels pass through each op.  A file per family; importing this package registers them all."""

from onnxgrail.graph.ops import (
    attention,
    conv,
    einsum,
    fused,
    join,
    layout,
    linear,
    pick,
    pointwise,
    recurrent,
    reduce,
    shapes,
    vision,
)

__all__ = [
    "attention",
    "conv",
    "einsum",
    "fused",
    "join",
    "layout",
    "linear",
    "pick",
    "pointwise",
    "recurrent",
    "reduce",
    "shapes",
    "vision",
]
