"""Keep types that onnx-ir does not support (maps, sequences of maps), as written by ZipMap in scikit-learn exports.

The types of such outputs are removed from the graph on loading, kept aside and written back on saving.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
import onnx_ir as ir

from onnxgrail.errors import ModelError
from onnxgrail.graph.io.soundness import graphs

_TYPE = "onnxgrail.type"  # key in a value's `meta`

Types = Mapping[str, onnx.TypeProto]


def set_aside(proto: onnx.ModelProto, label: str) -> tuple[onnx.ModelProto, Types]:
    """Return a model without map types, and the removed types by output name.

    The given message is not changed.

    Raises:
        ModelError: an input is a map, which calibration data cannot contain.
    """
    if not any(_has_map(value.type) for graph in graphs(proto) for value in _typed(graph)):
        return proto, {}
    for value in proto.graph.input:
        if _has_map(value.type):
            raise ModelError(
                f"{label}: the input {value.name!r} is a map, and calibration data are arrays",
                hint="Export the part of the pipeline that follows the vectorizer",
            )
    plain = onnx.ModelProto()
    plain.CopyFrom(proto)
    kept = {value.name: value.type for value in proto.graph.output if _has_map(value.type)}
    for graph in graphs(plain):
        for value in _typed(graph):
            if _has_map(value.type):
                value.ClearField("type")
    return plain, kept


def attach(outputs: Iterable[ir.Value], types: Types) -> None:
    """Store the types that were set aside at the outputs of a graph."""
    for value in outputs:
        kind = types.get(value.name or "")
        if kind is not None:
            value.meta[_TYPE] = kind


def write_back(proto: onnx.ModelProto, outputs: Iterable[ir.Value]) -> None:
    """Write the types stored by `attach` into a graph's message."""
    types = {value.name: value.meta[_TYPE] for value in outputs if _TYPE in value.meta}
    for info in proto.graph.output if types else ():
        if info.name in types:
            info.type.CopyFrom(types[info.name])


def is_tensor(value: ir.Value) -> bool:
    """Return False for an output that is a map, a sequence or an optional value."""
    return _TYPE not in value.meta and not isinstance(value.type, ir.SequenceType | ir.OptionalType)


def maps_text(model: ir.Model) -> str:
    """Return a note about outputs that are maps; empty if there are none."""
    names = [value.name or "" for value in model.graph.outputs if _TYPE in value.meta and _has_map(value.meta[_TYPE])]
    if not names:
        return ""
    are = f"output {names[0]} is a map" if len(names) == 1 else f"outputs {', '.join(names)} are maps"
    return f"{are}, which few runtimes know: skl2onnx writes a tensor with options={{'zipmap': False}}"


def _typed(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from graph.input
    yield from graph.output
    yield from graph.value_info


def _has_map(kind: onnx.TypeProto) -> bool:
    """Return True for a map, a sequence of maps or an optional map."""
    while kind.HasField("sequence_type") or kind.HasField("optional_type"):
        kind = kind.sequence_type.elem_type if kind.HasField("sequence_type") else kind.optional_type.elem_type
    return bool(kind.HasField("map_type"))
