"""Count multiply-accumulates in the bodies of Loop and Scan, which run repeatedly and are not traced."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.graph.attributes import integer, integers, names_of
from onnxgrail.graph.cost.counting import PRODUCTS, node_macs
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.trace.facts import Facts, bodies, captures, key
from onnxgrail.graph.trace.survey import Survey

SMALL = 64  # elements of the largest constant that may hold a target shape
MOST = 2**31  # passes; a larger trip count means no limit
SCAN = 9  # first opset in which Scan has no batch axis

Port = tuple[np.dtype, tuple[int, ...]]


def in_bodies(model: ir.Model, facts: Facts) -> dict[str, int]:
    """Return the count for one run on the probe feed, by node key; nodes with an unknown count are missing."""
    found = {key(node): _inside(node, facts, model) for node in model.graph if bodies(node)}
    return {name: count for name, count in found.items() if count is not None}


def _inside(node: ir.Node, facts: Facts, model: ir.Model) -> int | None:
    """Count all passes of a node's bodies; for an If, the larger branch."""
    ports = _ports(node, facts, model)
    if ports is None:
        return None
    passes, given = ports
    outer = {name: (facts.dtypes[name], facts.shapes[name]) for name in captures(node) if name in facts.shapes}
    counts = [_once(body, given, outer, facts, model) for body in bodies(node)]
    return None if any(count is None for count in counts) else passes * max(count or 0 for count in counts)


def _ports(node: ir.Node, facts: Facts, model: ir.Model) -> tuple[int, list[Port]] | None:
    """Return how often a body runs, and the dtypes and shapes of its inputs."""
    names = names_of(node.inputs)
    if node.op_type == "If":
        return 1, []
    count = integer(node, "num_scan_inputs") if node.op_type == "Scan" else 0
    states = names[: len(names) - count] if count else names[2:]
    if any(name not in facts.shapes for name in (*states, *names[len(names) - count :])):
        return None
    carried: list[Port] = [(facts.dtypes[name], facts.shapes[name]) for name in states]
    if node.op_type == "Loop":
        passes = _passes(node, names[0], len(states), facts)
        return None if passes is None else (passes, [(np.dtype("i8"), ()), (np.dtype("?"), ()), *carried])
    if node.op_type != "Scan" or not count or opset_of(model) < SCAN:
        return None
    axes, length = integers(node, "scan_input_axes", (0,) * count), 0
    for name, axis in zip(names[-count:], axes, strict=True):
        shape = list(facts.shapes[name])
        length = shape.pop(axis)
        carried.append((facts.dtypes[name], tuple(shape)))
    return length, carried


def _passes(node: ir.Node, limit: str, states: int, facts: Facts) -> int | None:
    """Return how often a Loop ran, from its scan outputs or else from its trip count; None if unknown."""
    collected = [value.name for value in node.outputs[states:] if value.name in facts.shapes]
    if collected:
        return facts.shapes[collected[0] or ""][0]
    known = facts.values.get(limit)
    most = int(known.ravel()[0]) if known is not None and known.size else MOST
    return most if most < MOST else None


def _once(body: ir.Graph, given: list[Port], captured: Mapping[str, Port], facts: Facts, model: ir.Model) -> int | None:
    """Count one pass of a body; None if shapes in it are not known."""
    if len(given) != len(body.inputs):
        return None
    ports = {**captured, **{value.name or "": port for value, port in zip(body.inputs, given, strict=True)}}
    tensors = {name: value.const_value for name, value in body.initializers.items() if value.const_value is not None}
    small = {name: tensor.numpy() for name, tensor in tensors.items() if tensor.size <= SMALL}
    fixed: dict[str, Array] = {n: facts.values[n] for n in captured if n in facts.constants and n in facts.values}
    small |= {name: array for name, array in fixed.items() if array.size <= SMALL}
    ports |= {name: (tensor.dtype.numpy(), tuple(tensor.shape.numpy())) for name, tensor in tensors.items()}
    ports |= {name: (array.dtype, array.shape) for name, array in small.items()}
    inner = _inferred(body, ports, small, facts, model)
    if inner is None:
        return None
    nested = {key(node): _inside(node, inner, model) for node in body if bodies(node)}
    unknown = [v for node in body if node.op_type in PRODUCTS for v in (*node.inputs, *node.outputs)]
    if any(v is not None and v.name and v.name not in inner.shapes for v in unknown) or None in nested.values():
        return None
    repeated = {name: count for name, count in nested.items() if count is not None}
    survey = Survey(blocks=(), refusals=(), facts=inner, marks={}, operands={}, ids=1, repeated=repeated)
    return sum(node_macs(node, survey, None) for node in body)


def _inferred(
    body: ir.Graph, ports: Mapping[str, Port], small: Mapping[str, Array], facts: Facts, model: ir.Model
) -> Facts | None:
    """Return the shapes that ONNX shape inference finds in a body; None if it fails."""
    kinds = {name: ir.DataType.from_numpy(dtype).value for name, (dtype, _) in ports.items()}
    inputs = [onnx.helper.make_tensor_value_info(n, kinds[n], list(shape)) for n, (_, shape) in ports.items()]
    graph = onnx.helper.make_graph(
        [ir.to_proto(node) for node in body],
        "body",
        [value for value in inputs if value.name not in small],
        [onnx.ValueInfoProto(name=value.name) for value in body.outputs],
        [ir.to_proto(ir.tensor(array, name=name)) for name, array in small.items()],
    )
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    try:
        whole = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=max(model.ir_version, 4))
        told = onnx.shape_inference.infer_shapes(whole, data_prop=True).graph
    except Exception:  # noqa: BLE001  inference fails on some ops: no shapes are known
        return None
    dtypes = {name: dtype for name, (dtype, _) in ports.items()}
    shapes = {name: shape for name, (_, shape) in ports.items()}
    for info in (*told.value_info, *told.output):
        kind = info.type.tensor_type
        dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
        if kind.HasField("shape") and None not in dims:
            shapes[info.name] = tuple(dim for dim in dims if dim is not None)
            dtypes[info.name] = ir.DataType(kind.elem_type).numpy()
    return Facts(
        shapes=shapes,
        dtypes=dtypes,
        values={**{n: v for n, v in facts.values.items() if n in ports}, **small},
        constants=frozenset(small),
        varying={},
    )
