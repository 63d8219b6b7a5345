"""Serialize models, for the runtime and for files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.errors import ModelError, first_cause
from onnxgrail.graph.attributes import is_read
from onnxgrail.graph.flatten.branches import folded, in_branch
from onnxgrail.graph.io.mapped import fields
from onnxgrail.graph.io.opaque import write_back
from onnxgrail.graph.io.running.steady import random_ops, steady
from onnxgrail.graph.io.running.widen import has_bfloat16, widen

LARGE = 2**16  # bytes; in-memory weights from this size on are passed to the runtime as arrays
PLAIN = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.INT8, ir.DataType.UINT8)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A model for the runtime: the serialized graph, and its large in-memory weights as arrays.

    Passing the arrays is about three times faster than serializing them into the message.
    """

    data: bytes
    weights: Mapping[str, Array]


def pack(
    model: ir.Model, outputs: Sequence[str] = (), *, change: Callable[[onnx.ModelProto], None] | None = None
) -> Packed:
    """Serialize a model as `to_bytes` does, but keep large weights as separate arrays."""
    if has_bfloat16(model):
        return Packed(to_bytes(model, outputs, change=change), {})
    with beside(model) as weights:
        return Packed(to_bytes(model, outputs, change=change), dict(weights))


@contextmanager
def beside(model: ir.Model) -> Iterator[dict[str, Array]]:
    """Replace large in-memory weights by external references inside the context, and yield them by name."""
    weights: dict[str, Array] = {}
    inside = dict(model.graph.initializers)
    tensors = {name: value.const_value for name, value in inside.items()}
    try:
        for name, value in inside.items():
            tensor = tensors[name]
            if tensor is None or isinstance(tensor, ir.ExternalTensor) or value.is_graph_input() or in_branch(value):
                continue
            if not is_read(value):  # the runtime drops these, and then refuses an array
                continue
            if tensor.dtype in PLAIN and tensor.nbytes >= LARGE:
                weights[name] = tensor.numpy()
                known = {**fields(tensor), "name": name}
                value.const_value = ir.ExternalTensor("memory", 0, tensor.nbytes, **known)
        yield weights
    finally:
        for name, value in inside.items():
            value.const_value = tensors[name]


def message(model: ir.Model) -> onnx.ModelProto:
    """Convert the model to a ModelProto; flattened branches are folded back into their If nodes.

    Raises:
        ModelError: the model cannot be serialized, for example because of invalid text.
    """
    try:
        proto: onnx.ModelProto = ir.to_proto(folded(model))
    except MemoryError:
        raise
    except Exception as error:  # onnx-ir wraps the cause once per level
        raise ModelError(f"the model cannot be written: {first_cause(error)}") from error
    write_back(proto, model.graph.outputs)
    return proto


def to_bytes(
    model: ir.Model,
    outputs: Sequence[str] = (),
    *,
    run: bool = True,
    change: Callable[[onnx.ModelProto], None] | None = None,
) -> bytes:
    """Serialize a model without recorded shapes of intermediate tensors, which may be stale.

    Args:
        model: the graph.
        outputs: names of further tensors to add as outputs.
        run: the bytes are for the runtime: convert bfloat16 to float32, and draw the same random numbers every time.
        change: called with the finished message, to modify it.
    """
    proto = message(model)
    if run and random_ops(model):
        steady(proto)
    if run and has_bfloat16(model):
        widen(proto)
    del proto.graph.value_info[:]
    have = {o.name for o in proto.graph.output}
    for name in outputs:
        if name not in have:
            proto.graph.output.append(onnx.ValueInfoProto(name=name))
    if change is not None:
        change(proto)
    data: bytes = proto.SerializeToString()
    return data


def runs_as_is(model: ir.Model) -> bool:
    """Return True if the runtime can run the file of a model, without the changes that `to_bytes` makes for it."""
    return not has_bfloat16(model) and not random_ops(model)


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """Return the model as a message in which large weights are inputs, declared by type and shape."""
    with beside(model):
        proto = message(model)
    inputs = {value.name for value in proto.graph.input}
    inside = []
    for tensor in proto.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            inside.append(tensor)
        elif tensor.name not in inputs:
            proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(inside)
    return proto


INFORMED = "onnxgrail.value_info"  # key in a model's `meta`: names that have a value_info in the file


def to_file(model: ir.Model) -> onnx.ModelProto:
    """Return the message to be written to a file.

    onnx-ir adds a value_info for every initializer; only those of the source file are kept.
    """
    proto = message(model)
    informed: Collection[str] = model.meta.get(INFORMED, ())
    weights = {tensor.name for tensor in proto.graph.initializer}
    for tensor in proto.graph.initializer:
        once = {entry.key: entry.value for entry in tensor.metadata_props}
        if len(once) < len(tensor.metadata_props):  # onnx-ir writes an initializer's metadata twice
            del tensor.metadata_props[:]
            for name, value in once.items():
                tensor.metadata_props.add(key=name, value=value)
    infos = [info for info in proto.graph.value_info if info.name not in weights or info.name in informed]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(infos)
    return proto
