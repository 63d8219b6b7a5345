"""Check a model against the limits of a runtime other than ONNX Runtime.

To add a runtime: put a table next to `tensorrt.toml`, and its name into `TARGETS`.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.graph.attributes import input_of, written
from onnxgrail.graph.io.opset import opset_of

WEIGHTY = ("Conv", "ConvTranspose", "MatMul", "Gemm", "DequantizeLinear")
CHANNELLED = ("Conv", "ConvTranspose")  # operators whose kernels are built for a fixed number of channels
SHOWN = 5  # number of weights that a piece of advice names


@functools.cache
def table(name: str) -> Mapping[str, Any]:
    """Return the table of a runtime's limits, with its source and date."""
    text = resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def check(model: ir.Model, name: str, *, strict: bool = False) -> dict[str, Any]:
    """Return a report entry: what the runtime rejects (`problem`) and what it would run slowly (`advice`).

    Args:
        model: the graph as it is written.
        name: of the runtime.
        strict: a problem fails the run's gate.

    Returns:
        name, table, source, date, strict, passed (no problem), findings: dicts of level, node, op and reason.
    """
    known = table(name)
    findings = [*_operators(model, known), *_types(model, known), *_shapes(model), *_widths(model, known)]
    return {
        "name": name,
        "table": known["name"],
        "source": known["source"],
        "date": known["date"],
        "strict": strict,
        "passed": all(found["level"] != "problem" for found in findings),
        "findings": findings,
    }


def _found(level: str, reason: str, node: ir.Node | None = None) -> dict[str, str]:
    return {
        "level": level,
        "node": "" if node is None else node.name or "",
        "op": "" if node is None else node.op_type,
        "reason": reason,
    }


def _operators(model: ir.Model, known: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    opset = opset_of(model)
    low, high = known["opsets"]
    if not low <= opset <= high:
        yield _found("advice", f"opset {opset} is outside {low} to {high}, which the table covers")
    for graph in model.graphs():
        for node in graph:
            if node.domain:
                yield _found("problem", f"operators of {node.domain} need a plug-in", node)
            elif node.op_type not in known["operators"]["supported"]:
                yield _found("problem", "the parser does not support this operator", node)
            else:
                yield from _limits(node, known)


def _limits(node: ir.Node, known: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield the parser's restrictions on a supported operator that a node violates."""
    for position in known["constants"].get(node.op_type, ()):
        value = input_of(node, position)
        if value is not None and _constant(value) is None:
            yield _found("problem", f"input {position} must be a constant", node)
    for position in known["zeros"].get(node.op_type, ()):
        value = input_of(node, position)
        if value is not None and (_constant(value) is None or np.any(_constant(value))):
            yield _found("problem", "the zero point must be zero (quantize with symmetric ranges)", node)
    most = known["outputs"].get(node.op_type)
    if most is not None and any(value.name and value.uses() for value in node.outputs[most:]):
        yield _found("problem", f"only the first {most} outputs are computed", node)
    for name, allowed in known["attributes"].get(node.op_type, {}).items():
        attribute = node.attributes.get(name)
        if attribute is None:
            continue
        values = attribute.value if isinstance(attribute.value, list | tuple) else [attribute.value]
        if any(value not in allowed for value in values):
            yield _found("problem", f"{name} must be {' or '.join(map(str, allowed))}", node)


def _constant(value: ir.Value) -> Any:
    """Return the array of an initializer or a Constant node, None for all other values."""
    tensor = value.const_value
    producer = value.producer()
    if tensor is None and producer is not None and producer.op_type == "Constant":
        tensor = written(producer)
        if tensor is None:  # value_ints and similar attributes
            return np.zeros(0)
    return None if tensor is None else tensor.numpy()


def _types(model: ir.Model, known: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    ports = {value.name: value.dtype for value in (*model.graph.inputs, *model.graph.outputs)}
    inside = {
        value.name: value.dtype
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.name not in ports
    }
    between = {value.name: kind for value, kind in _computed(model) if value.name not in ports}
    most = {*known["types"], *known["only_ports"]}
    for names, allowed in ((ports, most), (inside, set(known["types"])), (between, most)):
        for name, dtype in names.items():
            if dtype is None or dtype.name in allowed:
                continue
            if dtype.name in known["narrowed"]:
                yield _found("advice", f"{name} is {dtype.name} and will be cast to a smaller type")
            else:
                yield _found("problem", f"{name} has the type {dtype.name}")
    for node in _nodes(model):
        kind = node.attributes.get("to") if node.op_type == "Cast" else None
        dtype = None if kind is None else ir.DataType(kind.as_int())
        if dtype is not None and dtype.name not in {*most, *known["narrowed"]}:
            yield _found("problem", f"casts to {dtype.name}", node)


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Return the nodes of all graphs."""
    return (node for graph in model.graphs() for node in graph)


def _computed(model: ir.Model) -> Iterator[tuple[ir.Value, ir.DataType | None]]:
    """Yield the outputs of nodes with their types, None if unknown; except of casts, which state their type."""
    for node in _nodes(model):
        tensor = written(node)
        for value in node.outputs if node.op_type != "Cast" else ():
            yield value, value.dtype if tensor is None else tensor.dtype


def _shapes(model: ir.Model) -> Iterator[dict[str, str]]:
    for value in model.graph.inputs:
        if value.name in model.graph.initializers:
            continue
        if value.shape is None:
            yield _found("problem", f"input {value.name} declares no rank")
        elif not all(isinstance(dim, int) for dim in value.shape):
            dims = ", ".join(str(dim) if isinstance(dim, int) else str(dim.value or "?") for dim in value.shape)
            yield _found(
                "advice",
                f"input {value.name} [{dims}] has open sizes: build with a profile of least, best and most "
                "(--minShapes, --optShapes, --maxShapes of trtexec)",
            )
        for node in value.consumers():
            channels = list(value.shape or ())[1:2]
            if node.op_type in CHANNELLED and node.inputs[0] is value and channels and not isinstance(channels[0], int):
                yield _found("problem", f"the channels of its input {value.name} must have a fixed size", node)


def _widths(model: ir.Model, known: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield advice on channel counts that leave a part of the tensor cores idle."""
    odd: dict[int, list[str]] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        multiple = 1 if tensor is None else known["multiples"].get(tensor.dtype.name, 1)
        if tensor is None or len(tensor.shape) < 2 or not any(u.op_type in WEIGHTY for u in value.consumers()):
            continue
        dims = [int(size) for size in tensor.shape.numpy()[:2]]
        wrong = [size for size in dims if size > multiple and size % multiple]
        if wrong:
            odd.setdefault(multiple, []).append(f"{name} ({', '.join(map(str, wrong))})")
    for multiple, names in odd.items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield _found(
            "advice", f"channels that are no multiple of {multiple}: {', '.join(names[:SHOWN])}{more}; see --round-to"
        )
