"""Find layer and RMS normalizations over the last axis, as one node or as the nodes that exporters write for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Floats
from onnxgrail.graph.attributes import input_of, integer, maker_of, name_of, number, sole
from onnxgrail.graph.trace.facts import Facts, axes_of, scalar_of, vector_of

SMALL = 1e-5  # largest number that a length is at least
LENGTHENED = ("Clip", "Max", "Mul", "Add", "Expand")  # between a length and the division by it
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
        written = _of_length if node.op_type == "ReduceL2" else _written_out
        norm = _fused(node, facts) if node.op_type in FUSED else written(node, facts)
        if norm is not None:
            found.append(norm)
    return found


def roots_of(model: ir.Model, facts: Facts) -> list[Norm]:
    """Return the RMS normalizations that one node can stand for: `simplify` changes no numbers."""
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
    vectors = [vector_of(node, k, facts, shape[-1]) for k in (1, 2)]
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


def _written_out(node: ir.Node, facts: Facts) -> Norm | None:
    """Return the normalization whose mean of squares this node computes."""
    square = maker_of(node, 0)
    squared = _squared(square, facts) if _is_mean(node, facts) else None
    if square is None or squared is None:
        return None
    source, before = _uncentered(squared, facts)
    found = _Means(source, squared, before, [square, node])
    found = found if before else _less_squared_mean(found, facts)
    epsilon, after = _epsilon(found.steps[-1], facts)
    if after is None:
        return None
    norm = Norm(
        nodes=(*found.before, *dict.fromkeys((*found.steps, after))),
        source=source,
        result=source,
        width=facts.shapes[source.name or ""][-1],
        epsilon=epsilon,
        centered=bool(found.before),
    )
    divided = _divided(after, found.centered, facts)
    if divided is not None:
        return _with_vectors(_ended(norm, divided), facts)
    return _scaled_apart(norm, found, after, facts)


def _of_length(node: ir.Node, facts: Facts) -> Norm | None:
    """Return the normalization that divides by the length of x: the root of the width times the root mean square."""
    source, width = node.inputs[0], facts.shapes.get(name_of(node, 0), (0,))[-1]
    if source is None or not _is_over_last(node, facts):
        return None
    nodes, times, least = [node], 1.0, 0.0
    while (reader := sole(nodes[-1].outputs[0])) is not None and reader.op_type in LENGTHENED:
        known = [scalar_of(v, facts) for v in reader.inputs if v is not None and v is not nodes[-1].outputs[0]]
        if reader.op_type != "Expand":
            if len(known) != 1 or known[0] is None:
                return None
            times *= known[0] if reader.op_type == "Mul" else 1.0
            least = {"Mul": least * known[0], "Add": least + known[0]}.get(reader.op_type, max(least, known[0]))
        nodes.append(reader)
    if reader is None or reader.op_type != "Div" or [*reader.inputs] != [source, nodes[-1].outputs[0]]:
        return None
    size, gain = times * width**0.5, 1.0
    nodes.append(reader)
    while (reader := sole(nodes[-1].outputs[0])) is not None and reader.op_type == "Mul":
        factors = [n for value in reader.inputs if (n := scalar_of(value, facts)) is not None]
        if not factors:
            break
        gain *= factors[0]
        nodes.append(reader)
    if size <= 0 or not least <= SMALL:
        return None
    sizes = {"width": width, "epsilon": (least / size) ** 2, "centered": False}
    norm = _with_vectors(Norm(nodes=tuple(nodes), source=source, result=nodes[-1].outputs[0], **sizes), facts)
    return replace(norm, gain=np.full(width, gain / size) * (1.0 if norm.gain is None else norm.gain))


@dataclass(frozen=True, slots=True, eq=False)
class _Means:
    """The nodes that compute the mean of squares of a normalization.

    Attributes:
        source: x; centered: x - mean, or x if nothing is subtracted.
        before: the nodes of the mean and of its subtraction; steps: those of the mean of squares.
    """

    source: ir.Value
    centered: ir.Value
    before: list[ir.Node]
    steps: list[ir.Node]


def _ended(norm: Norm, nodes: list[ir.Node]) -> Norm:
    """Return a normalization with its last nodes."""
    return replace(norm, nodes=tuple(dict.fromkeys((*norm.nodes, *nodes))), result=nodes[-1].outputs[0])


def _less_squared_mean(means: _Means, facts: Facts) -> _Means:
    """Return the variance as mean of squares less squared mean, perhaps at least 0, as Flax computes it; else `means`.

    The difference of x and its mean is then computed apart.
    """
    node, x = means.steps[-1], means.source
    less = sole(node.outputs[0])
    product = maker_of(less, 1) if less is not None and less.op_type == "Sub" else None
    mean = _squared(product, facts)
    maker = mean.producer() if mean is not None else None
    if less is None or product is None or mean is None or maker is None or less.inputs[0] is not node.outputs[0]:
        return means
    apart = [use.node for use in mean.uses() if use.node.op_type == "Sub" and list(use.node.inputs) == [x, mean]]
    if not apart or not _is_mean(maker, facts) or maker.inputs[0] is not x:
        return means
    steps, least = [*means.steps, product, less], sole(less.outputs[0])
    if least is not None and least.op_type == "Max":
        steps += [least] if any(scalar_of(value, facts) == 0 for value in least.inputs) else []
    return _Means(x, apart[0].outputs[0], [maker, apart[0]], steps)


def _scaled_apart(norm: Norm, means: _Means, after: ir.Node, facts: Facts) -> Norm | None:
    """Return x * scale + (shift - mean * scale) with the inverse root in the scale, as TensorFlow computes it.

    Without a mean, it is x * scale.
    """
    nodes = _inverse(after, facts)
    scale, gain = nodes[-1].outputs[0] if nodes else None, None
    reader = sole(scale) if scale is not None else None
    if reader is not None and scale is not None and reader.op_type == "Mul":
        gain = vector_of(reader, 1 - reader.inputs.index(scale), facts, norm.width)
        nodes, scale = [*nodes, reader], reader.outputs[0] if gain is not None else None
    if scale is None:
        return None
    readers = [use.node for use in scale.uses()]
    first = next((n for n in readers if _takes(n, "Mul", norm.source, scale)), None)
    if first is None or len(readers) != 1 + len(means.before[:1]):
        return None
    norm = replace(_ended(norm, [*nodes, first]), gain=gain)
    return norm if not means.before else _shifted(norm, scale, means.before[0].outputs[0], facts)


def _shifted(norm: Norm, scale: ir.Value, mean: ir.Value, facts: Facts) -> Norm | None:
    """Add the nodes of + (shift - mean * scale), or - mean * scale, to a normalization that ends with x * scale."""
    negative = next((use.node for use in mean.uses() if use.node.op_type == "Neg"), None)
    less = mean if negative is None else negative.outputs[0]
    second = next((use.node for use in scale.uses() if _takes(use.node, "Mul", less, scale)), None)
    last = sole(second.outputs[0]) if second is not None else None
    if second is None or last is None or last.op_type != ("Sub" if negative is None else "Add"):
        return None
    product, operand = norm.result, 1 - last.inputs.index(second.outputs[0])
    if negative is None and operand != 0:  # mean * scale less something
        return None
    nodes = [*([negative] if negative is not None else []), second, last]
    if product in last.inputs and sole(product) is last:
        return _ended(norm, nodes)
    shift, end = vector_of(last, operand, facts, norm.width), sole(product)
    if (
        shift is None
        or end is None
        or not _takes(end, "Add", product, last.outputs[0])
        or sole(last.outputs[0]) is not end
    ):
        return None
    return replace(_ended(norm, [*nodes, end]), shift=shift)


def _is_mean(node: ir.Node, facts: Facts) -> bool:
    """Return True if a node computes the mean over the last axis alone and keeps it with length 1."""
    if node.op_type == "GlobalAveragePool":
        return len(facts.shapes.get(name_of(node, 0), ())) == 3
    return node.op_type == "ReduceMean" and _is_over_last(node, facts)


def _is_over_last(node: ir.Node, facts: Facts) -> bool:
    """Return True if a node reduces the last axis alone and keeps it with length 1."""
    shape = facts.shapes.get(name_of(node, 0))
    return bool(shape and integer(node, "keepdims", 1)) and axes_of(node, facts) == [len(shape or ()) - 1]


def _squared(node: ir.Node | None, facts: Facts) -> ir.Value | None:
    """Return x if a node computes x * x."""
    if node is None or node.op_type not in ("Pow", "Mul") or len(node.inputs) < 2:
        return None
    first, second = node.inputs[0], node.inputs[1]
    square = first is second if node.op_type == "Mul" else scalar_of(second, facts) == 2.0
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
    found = scalar_of(other, facts)
    return (0.0, None) if found is None else (found, reader)


def _divided(node: ir.Node, x: ir.Value, facts: Facts) -> list[ir.Node] | None:
    """Return the nodes that divide x by the root of this node's output."""
    root, power = _root(node, facts)
    last = sole(root.outputs[0]) if root is not None and power > 0 else None
    if root is not None and last is not None and last.op_type == "Div" and last.inputs[0] is x:
        return [root, last]
    inverse = _inverse(node, facts)
    product = sole(inverse[-1].outputs[0]) if inverse else None
    return [*inverse, product] if product is not None and _takes(product, "Mul", x, inverse[-1].outputs[0]) else None


def _inverse(node: ir.Node, facts: Facts) -> list[ir.Node]:
    """Return the nodes that compute the inverse root of this node's output; empty if there are none."""
    root, power = _root(node, facts)
    last = sole(root.outputs[0]) if root is not None and power > 0 else None
    if root is None or last is None:
        return [] if root is None or power > 0 else [root]
    inverse = last.op_type == "Reciprocal" or (last.op_type == "Div" and scalar_of(last.inputs[0], facts) == 1.0)
    return [root, last] if inverse else []


def _root(node: ir.Node, facts: Facts) -> tuple[ir.Node | None, float]:
    """Return the node that computes a root of this node's output, and the power: 0.5, or -0.5 for the inverse."""
    root = sole(node.outputs[0])
    power = 0.5 if root is not None and root.op_type == "Sqrt" else None
    power = scalar_of(root.inputs[1], facts) if root is not None and root.op_type == "Pow" else power
    return (root, power) if power in (0.5, -0.5) else (None, 0.0)


def _takes(node: ir.Node, op: str, *values: ir.Value) -> bool:
    return node.op_type == op and len(node.inputs) == len(values) and set(node.inputs) == set(values)


def _uncentered(value: ir.Value, facts: Facts) -> tuple[ir.Value, list[ir.Node]]:
    """Return x and the nodes that subtract its mean; the value itself if it is no such difference."""
    node = value.producer()
    if node is None or node.op_type != "Sub":
        return value, []
    source, mean = node.inputs[0], maker_of(node, 1)
    if source is None or mean is None or mean.inputs[:1] != (source,) or not _is_mean(mean, facts):
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
            vector = vector_of(reader, operand, facts, norm.width)
        if vector is None or reader is None:
            break
        norm = replace(norm, nodes=(*norm.nodes, *between, reader), result=reader.outputs[0])
        norm = replace(norm, gain=vector) if name == "gain" else replace(norm, shift=vector)
    return norm


def _uncast(value: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
    """Return the value, followed through a Cast that is its only reader."""
    reader = sole(value)
    return (reader.outputs[0], [reader]) if reader is not None and reader.op_type == "Cast" else (value, [])
