"""Convert models to and from protobuf, bytes and ONNX GraphSurgeon graphs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrail.errors import ModelError
from onnxgrail.graph.io.mapped import in_memory, weights_of
from onnxgrail.graph.io.model_file import LIMIT, copy, weight_bytes
from onnxgrail.graph.io.serial import to_file


def from_any(source: Any) -> Any:
    """Convert a `gs.Graph` to a ModelProto and a path-like object to a Path; return anything else unchanged."""
    if isinstance(source, os.PathLike):
        return Path(source)
    if type(source).__module__.startswith("onnx_graphsurgeon"):
        import onnx_graphsurgeon as gs

        return gs.export_onnx(source)
    return source


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """Convert a model to a ModelProto with all weights inside.

    Raises:
        ModelError: the model is over 2 GiB, the limit of a protobuf message.
    """
    if weight_bytes(model) > LIMIT:
        raise ModelError("a model over 2 GiB cannot be one message", hint="Write it to a file with `output`")
    whole = copy(model)
    for value, tensor in weights_of(whole):
        value.const_value = in_memory(tensor)
    return to_file(whole)


def to_bytes(model: ir.Model) -> bytes:
    """Serialize a model with all weights inside, for an inference session that is opened from memory.

    Raises:
        ModelError: the model is over 2 GiB.
    """
    data: bytes = to_proto(model).SerializeToString()
    return data


def to_graphsurgeon(model: ir.Model | onnx.ModelProto) -> Any:
    """Convert a model to a `gs.Graph`.

    GraphSurgeon loads all weights and drops documentation strings and metadata.
    """
    import onnx_graphsurgeon as gs

    return gs.import_onnx(to_proto(model) if isinstance(model, ir.Model) else model)
