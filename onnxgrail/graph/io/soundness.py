"""Check a model file before it is used: tensor sizes, attribute types, outputs, recursive functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import onnx
import onnx_ir as ir

from onnxgrail.errors import ModelError

RANK = 64  # the most axes that numpy supports
WRITTEN_OUT = 100_000  # nodes of a graph after its functions are inlined
TYPED = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")

STANDARD = "ai.onnx"  # alias of the empty domain
DAMAGED = "The file is damaged; export it again"

Call = tuple[str, str, str]


def check(model: onnx.ModelProto, label: str) -> None:
    """Refuse files that would use unlimited memory or fail later, far from the cause.

    Raises:
        ModelError: a tensor whose bytes do not fit its shape, an attribute of a type other than its operator's, an
            output that no node computes, or functions that call themselves or grow without bound.
    """
    for tensor in tensors(model):
        why = _wrong(tensor)
        if why:
            raise ModelError(f"{label}: the tensor {tensor.name!r} {why}", hint=DAMAGED)
    for node in _nodes(model.graph.node):
        if not any(node.output):
            raise ModelError(f"{label}: the node {node.name!r} ({node.op_type}) has no output")
    _check_attributes(model, label)
    _check_outputs(model.graph, label)
    _check_calls(model, label)


def _check_attributes(model: onnx.ModelProto, label: str) -> None:
    """Check that attributes have the types that the standard operators declare."""
    versions = {_short(opset.domain): opset.version for opset in model.opset_import}
    known: dict[tuple[str, str], Mapping[str, int]] = {}
    for node in _nodes(model.graph.node):
        domain = _short(node.domain)
        if node.attribute and (node.op_type, domain) not in known:
            known[node.op_type, domain] = _declared(node.op_type, domain, versions.get(domain, 0))
        for attribute in node.attribute:
            wanted = known[node.op_type, domain].get(attribute.name)
            where = f"{label}: the attribute {attribute.name!r} of the node "
            where += f"{node.name or node.output[0]!r} ({node.op_type})"
            if attribute.ref_attr_name:
                raise ModelError(f"{where} refers to an attribute of a function, and the node is in none", hint=DAMAGED)
            if attribute.type and wanted is not None and attribute.type != wanted:
                kinds = onnx.AttributeProto.AttributeType
                text = f"{where} is {kinds.Name(attribute.type)}, expected {kinds.Name(wanted)}"
                raise ModelError(text, hint=DAMAGED)
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise ModelError(f"{where} is a sparse tensor, which is not supported", hint="Store it dense first")


def _short(domain: str) -> str:
    return "" if domain == STANDARD else domain


def _declared(op: str, domain: str, version: int) -> Mapping[str, int]:
    """Return the types of an operator's attributes by name; empty for operators outside the standard."""
    try:
        attributes: Mapping[str, Any] = onnx.defs.get_schema(op, version, domain).attributes
    except onnx.defs.SchemaError:
        return {}
    return {name: int(attribute.type.value) for name, attribute in attributes.items()}


def _check_outputs(graph: onnx.GraphProto, label: str) -> None:
    """Check that every output is computed in the graph."""
    there = {name for node in graph.node for name in node.output}
    there.update(value.name for value in graph.input)
    there.update(tensor.name for tensor in graph.initializer)
    for value in graph.output:
        if not value.name or value.name not in there:
            raise ModelError(f"{label}: nothing in the graph makes the output {value.name!r}", hint=DAMAGED)


def _wrong(tensor: onnx.TensorProto) -> str:
    """Return what is wrong with a tensor; empty if it is valid."""
    if any(size < 0 for size in tensor.dims):
        return f"has a negative size ({list(tensor.dims)[:8]})"
    if len(tensor.dims) > RANK:
        return f"has {len(tensor.dims)} axes, more than {RANK}"
    try:
        bits = 0 if tensor.data_type == onnx.TensorProto.STRING else ir.DataType(tensor.data_type).bitwidth
    except (ValueError, TypeError):
        return f"is of an unknown type ({tensor.data_type})"
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return ""  # checked later, against the file it names
    count = prod(tensor.dims)
    if tensor.HasField("raw_data"):
        need = -(-count * bits // 8)
        return "" if len(tensor.raw_data) == need else f"holds {len(tensor.raw_data)} bytes, its shape needs {need}"
    held = sum(len(getattr(tensor, name)) for name in TYPED)
    kind = onnx.TensorProto.DataType.Name(tensor.data_type) if bits else "STRING"
    need = 2 * count if kind.startswith("COMPLEX") else -(-count * bits // 8) if 0 < bits < 8 else count
    return "" if held == need else f"holds {held} numbers, its shape needs {need}"


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield all tensors of a message: weights and constants of its graph, bodies and functions."""
    yield from model.graph.initializer
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in _nodes(nodes):
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.TENSOR:
                    yield attribute.t
                yield from attribute.tensors
                for graph in bodies(attribute):
                    yield from graph.initializer


def _nodes(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those in their bodies, at any depth (protobuf limits nesting to 100 levels)."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in bodies(attribute):
                yield from _nodes(graph.node)


def graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yield the graph of a message and all bodies in it, at any depth."""
    yield model.graph
    for node in _nodes(model.graph.node):
        for attribute in node.attribute:
            yield from bodies(attribute)


def bodies(attribute: onnx.AttributeProto) -> list[onnx.GraphProto]:
    """Return the graphs in an attribute."""
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]


def _check_calls(model: onnx.ModelProto, label: str) -> None:
    """Check that functions do not recurse and do not grow exponentially when inlined."""
    calls: dict[Call, Counter[Call]] = {}
    for function in model.functions:
        inside = Counter(_call(node) for node in _nodes(function.node))
        calls[function.domain, function.name, function.overload] = inside
    if not calls:
        return
    sizes: dict[Call, int] = {}
    for start in calls:
        _measure(start, calls, sizes, label)
    total = sum(sizes.get(_call(node), 1) for node in _nodes(model.graph.node))
    if total > WRITTEN_OUT and total > len(model.graph.node):
        raise ModelError(f"{label}: written out, its functions have {total:.3g} nodes, more than {WRITTEN_OUT}")


def _call(node: onnx.NodeProto) -> Call:
    return node.domain, node.op_type, node.overload


def _measure(start: Call, calls: Mapping[Call, Counter[Call]], sizes: dict[Call, int], label: str) -> None:
    """Count the nodes of a function with those of all functions it calls, without recursion: chains may be long."""
    path: list[Call] = [start]
    on_path = {start}
    while path:
        inside = calls[path[-1]]
        waiting = next((call for call in inside if call in calls and call not in sizes), None)
        if waiting is None:
            name = path.pop()
            on_path.discard(name)
            sizes[name] = sum(count * sizes.get(call, 1) for call, count in inside.items())
        elif waiting in on_path:
            raise ModelError(f"{label}: the function {waiting[1]!r} calls itself", hint="Functions of ONNX must end")
        else:
            path.append(waiting)
            on_path.add(waiting)
