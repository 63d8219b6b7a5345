"""ONNX GraphSurgeon in and out, for people who build TensorRT graphs with it."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_ir as ir


def from_any(source: Any) -> Any:
    """A `gs.Graph` as a ModelProto; everything else as it is."""
    if type(source).__module__.startswith("onnx_graphsurgeon"):
        import onnx_graphsurgeon as gs

        return gs.export_onnx(source)
    return source


def to_graphsurgeon(model: ir.Model | onnx.ModelProto) -> Any:
    """A model as a `gs.Graph`; it loads all weights and drops documentation strings and metadata (its own limits)."""
    import onnx_graphsurgeon as gs

    return gs.import_onnx(ir.to_proto(model) if isinstance(model, ir.Model) else model)
