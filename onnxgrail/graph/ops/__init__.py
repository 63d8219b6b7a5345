"""How channels pass through each op.  A file per family; importing this package registers them all."""

from onnxgrail.graph.ops import conv, join, layout, linear, pointwise, reduce, shapes

__all__ = ["conv", "join", "layout", "linear", "pointwise", "reduce", "shapes"]
