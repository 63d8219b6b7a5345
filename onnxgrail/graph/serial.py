"""Model to bytes for the runtime."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx
import onnx_ir as ir

from onnxgrail.graph.widen import has_bfloat16, widen


def to_bytes(model: ir.Model, outputs: Sequence[str] = (), *, run: bool = True) -> bytes:
    """Serialise, with further tensors as outputs; recorded shapes of intermediates are left out (they may be stale).

    To be run, bfloat16 becomes float32.
    """
    proto = ir.to_proto(model)
    if run and has_bfloat16(model):
        widen(proto)
    del proto.graph.value_info[:]
    have = {o.name for o in proto.graph.output}
    for name in outputs:
        if name not in have:
            proto.graph.output.append(onnx.ValueInfoProto(name=name))
    data: bytes = proto.SerializeToString()
    return data


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model with weights that lie in files turned into inputs: their type is all there is to say."""
    proto: onnx.ModelProto = ir.to_proto(model)
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
    proto: onnx.ModelProto = ir.to_proto(model)
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
