"""Models of other libraries in and out: protobuf, bytes, and ONNX GraphSurgeon for people who build with TensorRT."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrail.errors import ModelError
from onnxgrail.graph.io.mapped import in_memory
from onnxgrail.graph.io.model_file import LIMIT, copy, weight_bytes
from onnxgrail.graph.io.serial import to_file


def from_any(source: Any) -> Any:
    """A `gs.Graph` as a ModelProto, whatever names a file as its path; everything else as it is."""
    if isinstance(source, os.PathLike):
        return Path(source)
    if type(source).__module__.startswith("onnx_graphsurgeon"):
        import onnx_graphsurgeon as gs

        return gs.export_onnx(source)
    return source


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """A model with all weights inside, as a file would have it.

    Raises:
        ModelError: it is over 2 GiB, which no message of protobuf can hold.
    """
    if weight_bytes(model) > LIMIT:
        raise ModelError("a model over 2 GiB cannot be one message", hint="Write it to a file with `output`")
    whole = copy(model)
    for graph in whole.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = in_memory(value.const_value)
    return to_file(whole)


def to_bytes(model: ir.Model) -> bytes:
    """A model as the bytes of its file, for a session that is opened from memory.

    Raises:
        ModelError: it is over 2 GiB.
    """
    data: bytes = to_proto(model).SerializeToString()
    return data


def to_graphsurgeon(model: ir.Model | onnx.ModelProto) -> Any:
    """A model as a `gs.Graph`; it loads all weights and drops documentation strings and metadata (its own limits)."""
    import onnx_graphsurgeon as gs

    return gs.import_onnx(to_proto(model) if isinstance(model, ir.Model) else model)
