"""Model to bytes for the runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.errors import ModelError
from onnxgrail.graph.flatten.branches import folded, in_branch
from onnxgrail.graph.io.opaque import write_back
from onnxgrail.graph.io.widen import has_bfloat16, widen

LARGE = 2**16  # bytes from which on a weight in memory is handed over as it is
PLAIN = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.INT8, ir.DataType.UINT8)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A model for the runtime: the graph as bytes, and the large weights that lie in memory beside it.

    Copying weights into a message, the message into bytes and the bytes into the runtime takes three times as long as
    handing them over.
    """

    data: bytes
    weights: Mapping[str, Array]


def pack(
    model: ir.Model, outputs: Sequence[str] = (), *, change: Callable[[onnx.ModelProto], None] | None = None
) -> Packed:
    """As `to_bytes`, with large weights beside the bytes."""
    if has_bfloat16(model):
        return Packed(to_bytes(model, outputs, change=change), {})
    with beside(model) as weights:
        return Packed(to_bytes(model, outputs, change=change), dict(weights))


@contextmanager
def beside(model: ir.Model) -> Iterator[dict[str, Array]]:
    """Have the large weights that lie in memory stand outside of the model for a while."""
    weights: dict[str, Array] = {}
    inside = dict(model.graph.initializers)
    tensors = {name: value.const_value for name, value in inside.items()}
    try:
        for name, value in inside.items():
            tensor = tensors[name]
            if tensor is None or isinstance(tensor, ir.ExternalTensor) or value.is_graph_input() or in_branch(value):
                continue
            if tensor.dtype in PLAIN and tensor.nbytes >= LARGE:
                weights[name] = tensor.numpy()
                shape = ir.Shape(weights[name].shape)
                value.const_value = ir.ExternalTensor("memory", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
        yield weights
    finally:
        for name, value in inside.items():
            value.const_value = tensors[name]


def message(model: ir.Model) -> onnx.ModelProto:
    """The model as a message, in which branches that are laid out lie in their If again.

    Raises:
        ModelError: it holds what cannot be written, such as text that is no text.
    """
    try:
        proto: onnx.ModelProto = ir.to_proto(folded(model))
    except MemoryError:
        raise
    except Exception as error:  # onnx-ir wraps whatever comes up, level by level
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ModelError(f"the model cannot be written: {cause}") from error
    write_back(proto, model.graph.outputs)
    return proto


def to_bytes(
    model: ir.Model,
    outputs: Sequence[str] = (),
    *,
    run: bool = True,
    change: Callable[[onnx.ModelProto], None] | None = None,
) -> bytes:
    """Serialise, with further tensors as outputs; recorded shapes of intermediates are left out (they may be stale).

    To be run, bfloat16 becomes float32.  `change` is called with the message at the end.
    """
    proto = message(model)
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


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model with its large weights turned into inputs: their type is all there is to say."""
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


INFORMED = "onnxgrail.value_info"  # key of a model's transient `meta`: names that came with a value_info


def to_file(model: ir.Model) -> onnx.ModelProto:
    """The model as it is written: onnx-ir describes every initializer, which only some source files did."""
    proto = message(model)
    informed: Collection[str] = model.meta.get(INFORMED, ())
    weights = {tensor.name for tensor in proto.graph.initializer}
    for tensor in proto.graph.initializer:
        once = {entry.key: entry.value for entry in tensor.metadata_props}
        if len(once) < len(tensor.metadata_props):  # onnx-ir writes those of an initializer twice
            del tensor.metadata_props[:]
            for name, value in once.items():
                tensor.metadata_props.add(key=name, value=value)
    infos = [info for info in proto.graph.value_info if info.name not in weights or info.name in informed]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(infos)
    return proto
