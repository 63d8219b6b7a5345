"""Find layer and RMS normalizations over the last axis, as one node or as the nodes that exporters write for them.

RMS normalizations can be replaced by one node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Floats
from onnxgrail.graph.attributes import input_of, integer, integers, is_read, maker_of, name_of, number
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.assign import sweep
from onnxgrail.graph.rewrite.unique import free_name
from onnxgrail.graph.rotate.marked import PLAIN
from onnxgrail.graph.trace.facts import Facts, constant_of

EPSILON = 1e-5  # the default of LayerNormalization
FUSED = {"LayerNormalization": True, "RMSNormalization": False, "SimplifiedLayerNormalization": False}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Norm:
    """A normalization over the last axis: y = (x - mean) / sqrt(mean square + epsilon) * gain + shift.

    Attributes:
        nodes: its nodes, in graph order.
        source: x; result: y.
        width: length of the last axis.
        epsilon: as above.
        centered: the mean is subtracted (layer normalization); else it is not (RMS normalization).
        gain, shift: (width,), or None.
    """

    nodes: tuple[ir.Node, ...]
    source: ir.Value
    result: ir.Value
    width: int
    epsilon: float
    centered: bool
    gain: Floats | None = None
    shift: Floats | None = None


def norms_of(model: ir.Model, facts: Facts) -> list[Norm]:
    """Return the normalizations of a graph, in graph order."""
    found = []
    for node in model.graph:
        norm = _fused(node, facts) if node.op_type in FUSED else _written_out(node, facts)
        if norm is not None:
            found.append(norm)
    return found


def roots_of(model: ir.Model, facts: Facts) -> list[Norm]:
    """Return the RMS normalizations that one node can stand for: `simplify` replaces them and changes no numbers."""
    found = [_of_one_type(norm, facts) for norm in norms_of(model, facts) if not norm.centered and norm.shift is None]
    return [norm for norm in found if norm is not None and _is_apart(norm)]


def _of_one_type(norm: Norm, facts: Facts) -> Norm | None:
    """Return the normalization from before a cast to a wider type, if its result is cast back; None if types differ."""
    types, last = facts.dtypes, norm.result.name or ""
    if types.get(norm.source.name or "") == types.get(last):
        return norm
    cast = norm.source.producer()
    source = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
    if cast is None or source is None or types.get(source.name or "") != types.get(last):
        return None
    return replace(norm, source=source, nodes=(cast, *norm.nodes))


def _is_apart(norm: Norm) -> bool:
    """Return True if nothing else reads the values between the nodes."""
    values = [value for node in norm.nodes[:-1] for value in node.outputs]
    return not any(v.is_graph_output() or any(use.node not in norm.nodes for use in v.uses()) for v in values)


def _fused(node: ir.Node, facts: Facts) -> Norm | None:
    source, result = node.inputs[0], node.outputs[0]
    shape = facts.shapes.get(source.name or "") if source is not None else None
    if source is None or not shape or node.domain:
        return None
    if integer(node, "axis", -1) % len(shape) != len(shape) - 1 or any(v.uses() for v in node.outputs[1:]):
        return None
    vectors = [_vector(node, k, facts, shape[-1]) for k in (1, 2)]
    if any(vector is None and input_of(node, k) is not None for k, vector in enumerate(vectors, 1)):
        return None
    return Norm(
        nodes=(node,),
        source=source,
        result=result,
        width=shape[-1],
        epsilon=number(node, "epsilon", EPSILON),
        centered=FUSED[node.op_type],
        gain=vectors[0],
        shift=vectors[1],
    )


def _vector(node: ir.Node, operand: int, facts: Facts, width: int) -> Floats | None:
    """Return a constant operand with one number per position of the last axis; None for anything else."""
    value = input_of(node, operand)
    if value is None or value.name not in facts.constants or value.name in facts.stored:
        return None
    array = constant_of(value, value.name or "", facts)
    if array is None or array.size != width or array.shape[-1:] != (width,):
        return None
    return np.asarray(array, dtype=np.float64).ravel()


def _written_out(node: ir.Node, facts: Facts) -> Norm | None:
    """Return the normalization whose mean of squares this node computes."""
    if node.op_type != "ReduceMean" or not _over_last(node, facts):
        return None
    square = maker_of(node, 0)
    centered = _squared(square, facts)
    if square is None or centered is None:
        return None
    epsilon, after = _epsilon(node, facts)
    if after is None:
        return None
    divided = _divided(after, centered, facts)
    if divided is None:
        return None
    steps = list(dict.fromkeys((square, node, after, *divided)))
    source, before = _uncentered(centered, facts)
    width = facts.shapes[centered.name or ""][-1]
    norm = Norm(
        nodes=(*before, *steps),
        source=source,
        result=steps[-1].outputs[0],
        width=width,
        epsilon=epsilon,
        centered=bool(before),
    )
    return _with_vectors(norm, facts)


def sole(value: ir.Value) -> ir.Node | None:
    """Return the only reader of a value; None if there are several, or if it is an output."""
    readers = {use.node for use in value.uses()}
    return next(iter(readers)) if len(readers) == 1 and not value.is_graph_output() else None


def _over_last(node: ir.Node, facts: Facts) -> bool:
    """Return True if a node reduces the last axis alone and keeps it with length 1."""
    shape = facts.shapes.get(name_of(node, 0))
    if not shape or not integer(node, "keepdims", 1):
        return False
    given = facts.values.get(name_of(node, 1))
    axes = integers(node, "axes") if given is None else tuple(int(a) for a in given.ravel())
    return len(axes) == 1 and axes[0] % len(shape) == len(shape) - 1


def _scalar(value: ir.Value | None, facts: Facts) -> float | None:
    if value is None or value.name not in facts.constants:
        return None
    array: Array | None = constant_of(value, value.name or "", facts)
    return float(array.ravel()[0]) if array is not None and array.size == 1 else None


def _squared(node: ir.Node | None, facts: Facts) -> ir.Value | None:
    """Return x if a node computes x * x."""
    if node is None or node.op_type not in ("Pow", "Mul") or len(node.inputs) < 2:
        return None
    first, second = node.inputs[0], node.inputs[1]
    square = first is second if node.op_type == "Mul" else _scalar(second, facts) == 2.0
    return first if square else None


def _epsilon(node: ir.Node, facts: Facts) -> tuple[float, ir.Node | None]:
    """Return the constant that is added to a mean, and the node that adds it.

    Exporters leave out a constant near zero. The result is then zero and the node of the mean.
    """
    reader = sole(node.outputs[0])
    if reader is not None and reader.op_type == "Sqrt":
        return 0.0, node
    if reader is None or reader.op_type != "Add":
        return 0.0, None
    other = next((v for v in reader.inputs if v is not node.outputs[0]), None)
    found = _scalar(other, facts)
    return (0.0, None) if found is None else (found, reader)


def _divided(node: ir.Node, x: ir.Value, facts: Facts) -> list[ir.Node] | None:
    """Return the nodes that divide x by the root of this node's output."""
    root = sole(node.outputs[0])
    if root is None:
        return None
    power = _scalar(root.inputs[1], facts) if root.op_type == "Pow" else None
    if root.op_type != "Sqrt" and power not in (0.5, -0.5):
        return None
    last = sole(root.outputs[0])
    if last is None:
        return None
    if power == -0.5:
        return [root, last] if _takes(last, "Mul", x, root.outputs[0]) else None
    if last.op_type == "Div" and last.inputs[0] is x and last.inputs[1] is root.outputs[0]:
        return [root, last]
    inverse = last.op_type == "Reciprocal" or (last.op_type == "Div" and _scalar(last.inputs[0], facts) == 1.0)
    product = sole(last.outputs[0]) if inverse else None
    return [root, last, product] if product is not None and _takes(product, "Mul", x, last.outputs[0]) else None


def _takes(node: ir.Node, op: str, *values: ir.Value) -> bool:
    return node.op_type == op and len(node.inputs) == len(values) and set(node.inputs) == set(values)


def _uncentered(value: ir.Value, facts: Facts) -> tuple[ir.Value, list[ir.Node]]:
    """Return x and the nodes that subtract its mean; the value itself if it is no such difference."""
    node = value.producer()
    if node is None or node.op_type != "Sub":
        return value, []
    source, mean = node.inputs[0], maker_of(node, 1)
    own = source is not None and mean is not None and mean.op_type == "ReduceMean" and mean.inputs[0] is source
    if not own or mean is None or source is None or not _over_last(mean, facts):
        return value, []
    return source, [mean, node]


def _with_vectors(norm: Norm, facts: Facts) -> Norm:
    """Add the gain and the shift that the next nodes apply, if nothing else reads the values between."""
    for op, name in (("Mul", "gain"), ("Add", "shift")):
        value, between = _uncast(norm.result)
        reader = sole(value)
        vector = None
        if reader is not None and reader.op_type == op and len(reader.inputs) == 2:
            operand = 1 if reader.inputs[0] is value else 0
            vector = _vector(reader, operand, facts, norm.width)
        if vector is None or reader is None:
            break
        norm = replace(norm, nodes=(*norm.nodes, *between, reader), result=reader.outputs[0])
        norm = replace(norm, gain=vector) if name == "gain" else replace(norm, shift=vector)
    return norm


def _uncast(value: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
    """Return the value, followed through a Cast that is its only reader."""
    reader = sole(value)
    return (reader.outputs[0], [reader]) if reader is not None and reader.op_type == "Cast" else (value, [])


def simplify(graph: ir.Graph, norm: Norm, marks: Mapping[str, str], types: tuple[np.dtype, np.dtype]) -> None:
    """Replace a normalization by one node that divides by the root mean square and applies the gain.

    Half types are often normalized in float32. Then a cast follows the node.

    Args:
        graph: changed in place.
        norm: its shift is left out, and the mean is not subtracted.
        marks: metadata of the node.
        types: of what it reads and of its result.
    """
    result = norm.result
    numbers = np.ones(norm.width) if norm.gain is None else norm.gain
    gain = constant(graph, numbers.astype(types[0]), f"{result.name}/gain")
    attributes = [ir.AttrInt64("axis", -1), ir.AttrFloat32("epsilon", norm.epsilon)]
    node = ir.Node("", PLAIN, [norm.source, gain], attributes, num_outputs=1, name=norm.nodes[-1].name)
    node.metadata_props.update(marks)
    graph.insert_after(norm.nodes[-1], node)
    fresh, name = _as_type(graph, node, types, f"{result.name}/wide"), result.name
    fresh.type, fresh.shape = result.type, result.shape
    result.replace_all_uses_with(fresh)
    read = [value for old in norm.nodes for value in old.inputs if value is not None]
    for old in reversed(norm.nodes):
        if not any(map(is_read, old.outputs)):
            graph.remove(old, safe=True)
    sweep(graph, read)
    result.name = None if result.producer() is None else f"{name}/old"
    fresh.name = name


def _as_type(graph: ir.Graph, node: ir.Node, types: tuple[np.dtype, np.dtype], name: str) -> ir.Value:
    """Return the output of a node in the second of two types, cast from the first if they differ."""
    made = node.outputs[0]
    if types[0] == types[1]:
        return made
    made.name = free_name(graph, name)
    to = ir.AttrInt64("to", int(ir.DataType.from_numpy(types[1])))
    cast = ir.Node("", "Cast", [made], [to], num_outputs=1, name=free_name(graph, f"{name}/Cast"))
    graph.insert_after(node, cast)
    return cast.outputs[0]
