"""Write a model weight by weight: at most one weight is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxgrail.errors import ModelError
from onnxgrail.graph.io import mapped
from onnxgrail.graph.io.mapped import Mapped, fields, in_memory, weights_of
from onnxgrail.graph.io.serial import beside, to_file
from onnxgrail.graph.io.wire import head
from onnxgrail.machine.files.placing import Hashed, Weights

SMALL = 256  # bytes; weights up to this size stay in the model file even with external data
ALIGN = 64  # bytes; alignment for memory maps and vector loads
_GRAPH, _INITIALIZER, _RAW = 7, 5, 9  # field numbers of ModelProto.graph, GraphProto.initializer, TensorProto.raw_data
_NUMBERS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")  # of TensorProto


def unload(model: ir.Model, path: Path, named: Callable[[str], str]) -> Weights | None:
    """Write all weights except small ones to a file and make the model refer to it as external data.

    Args:
        model: the graph, changed in place.
        path: where the file is written.
        named: returns the final file name for a checksum.

    Returns:
        The file; None if there are only small weights.
    """
    starts: dict[ir.Value, tuple[int, ir.TensorProtocol]] = {}
    with path.open("wb") as raw:
        file = Hashed(raw)
        for value, tensor in weights_of(model):
            if tensor.nbytes <= SMALL or isinstance(tensor, ir.StringTensor):
                value.const_value = in_memory(tensor)
                continue
            file.write(b"\0" * (-file.size % ALIGN))
            starts[value] = file.size, tensor
            _write(tensor, file)
    if not starts:
        return None
    weights = Weights(path=path, name=named(file.digest), sha256=file.digest)
    for value, (start, tensor) in starts.items():
        value.const_value = ir.ExternalTensor(weights.name, start, tensor.nbytes, **fields(tensor))
    return weights


def _write(tensor: ir.TensorProtocol, file: Hashed) -> None:
    """Write the numbers of a weight.

    Raises:
        ModelError: fewer bytes were written than the shape needs.
    """
    start = file.size
    mapped.write(tensor, file)
    if file.size - start != tensor.nbytes:
        raise ModelError(
            f"weight {tensor.name!r}: {file.size - start} bytes were written where its shape needs {tensor.nbytes}",
            hint="The file that holds it may have changed while it was read: repeat the command",
        )


def write_inline(model: ir.Model, path: Path) -> str:
    """Write a model file; weights that `unload` wrote stay external.

    Mapped weights are copied from their files.  Their fields are encoded directly: building the whole message in memory
    would take several times the size of the model.

    Returns:
        The checksum of the file.
    """
    for value, held in weights_of(model):
        if isinstance(held, Mapped) and value.name not in model.graph.initializers:
            value.const_value = in_memory(held)  # in a body: rare and small
    proto = to_file(model)
    stored = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, Mapped)
    }
    if not stored:
        return _written(path, [proto.SerializeToString()])
    weights = [_split(tensor, stored.get(tensor.name)) for tensor in proto.graph.initializer]
    del proto.graph.initializer[:]
    graph = proto.graph.SerializeToString()
    proto.ClearField("graph")
    total = len(graph) + sum(len(head(_INITIALIZER, size)) + size for _, _, size in weights)
    pieces: list[bytes | Mapped] = [proto.SerializeToString() + head(_GRAPH, total) + graph]
    for start, tensor, size in weights:
        pieces += [head(_INITIALIZER, size) + start, *([] if tensor is None else [tensor])]
    return _written(path, pieces)


def _written(path: Path, pieces: Iterable[bytes | Mapped]) -> str:
    with path.open("wb") as raw:
        file = Hashed(raw)
        for piece in pieces:
            if isinstance(piece, bytes):
                file.write(piece)
            else:
                _write(piece, file)
    return file.digest


def written_bytes(model: ir.Model, weights: str = "") -> int:
    """Return how many bytes the files of a model would take, without reading large weights.

    Args:
        model: the graph.
        weights: name of the file to which `unload` would write the weights; empty if they stay in the model file.
    """
    with beside(model) as large:
        proto = to_file(model)
    sizes = {name: array.nbytes for name, array in large.items()}
    sizes |= {v.name or "": held.nbytes for v, held in weights_of(model) if isinstance(held, Mapped)}
    apart = _apart(model, proto, weights) if weights else {}
    whole = {
        v.name or "": held.raw.ByteSize() for v, held in weights_of(model) if isinstance(held, ir.TensorProtoTensor)
    }
    inside = {name: len(head(_RAW, size)) + size for name, size in sizes.items() if name not in apart}
    more = 0
    for tensor in proto.graph.initializer:
        if tensor.name in inside:
            del tensor.external_data[:]
            tensor.ClearField("data_location")
            size = tensor.ByteSize()
            longer = whole[tensor.name] - size if tensor.name in whole else inside[tensor.name]  # as it was read
            more += longer + _longer_head(_INITIALIZER, size, longer)
    more += _longer_head(_GRAPH, proto.graph.ByteSize(), more)
    ends = 0  # of the weights in a file of their own
    for size in apart.values():
        ends += -ends % ALIGN + size
    size_of_graph: int = proto.ByteSize()
    return size_of_graph + more + ends


def _longer_head(field: int, size: int, more: int) -> int:
    """Return by how many bytes the header of a message grows when the message does."""
    return len(head(field, size + more)) - len(head(field, size))


def _apart(model: ir.Model, proto: onnx.ModelProto, file: str) -> dict[str, int]:
    """Make a message refer to a weights file, as after `unload`; return the bytes of these weights by name."""
    large = {v.name or "": t.nbytes for v, t in weights_of(model) if t.nbytes > SMALL and t.dtype != ir.DataType.STRING}
    start, sizes = 0, {}
    for tensor in proto.graph.initializer:
        if tensor.name in large:
            sizes[tensor.name] = large[tensor.name]
            for numbers in _NUMBERS:
                tensor.ClearField(numbers)
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", file), ("offset", start), ("length", large[tensor.name])):
                tensor.external_data.add(key=key, value=str(value))
            start += large[tensor.name] + -large[tensor.name] % ALIGN
    return sizes


def _split(proto: onnx.TensorProto, tensor: Mapped | None) -> tuple[bytes, Mapped | None, int]:
    """Return a tensor's message up to its numbers, the tensor with the numbers, and the length of both."""
    if tensor is None:
        whole = proto.SerializeToString()
        return whole, None, len(whole)
    del proto.external_data[:]
    proto.ClearField("data_location")
    start = proto.SerializeToString() + head(_RAW, tensor.nbytes)
    return start, tensor, len(start) + tensor.nbytes
