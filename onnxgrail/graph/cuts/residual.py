"""Residual layers: from the input of a skip connection to the sum that ends it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.graph.cuts.chunks import MIXING
from onnxgrail.graph.fittable.matrices import LINEAR, WEIGHTED
from onnxgrail.graph.fittable.trainable import trainable
from onnxgrail.graph.notes import common_scope
from onnxgrail.graph.trace.facts import key

SUMS = {"Add": 0, "SkipLayerNormalization": 3, "SkipSimplifiedLayerNormalization": 3}
"""Ops that add a skip connection -> number of the output that is the plain sum."""


Names = Collection[str]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layer:
    """A residual layer.

    Attributes:
        name: of the module, or `layer N`.
        begin, end: the input tensor and the output tensor.
        nodes: all nodes between them, without the skip connection.
    """

    name: str
    begin: str
    end: str
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A skip connection around attention, a feed-forward network, or both in parallel."""

    begin: str
    end: str
    nodes: frozenset[ir.Node]

    @property
    def mixes(self) -> bool:
        return any(node.op_type in MIXING for node in self.nodes)


def layers(model: ir.Model, shapes: Mapping[str, tuple[int, ...]], fixed: Names) -> tuple[Layer, ...]:
    """Return all residual layers with a weight matrix, in order.

    Attention and the feed-forward network after it are one layer.

    Args:
        model: any graph.
        shapes: of its tensors, or of those it was narrowed from.
        fixed: values that depend on no input.
    """
    order = {node: number for number, node in enumerate(model.graph)}
    groups: list[list[_Part]] = []
    open_for_more = False
    for part in _parts(model, order, shapes, fixed):
        if groups and not part.mixes and open_for_more:
            groups[-1].append(part)
            open_for_more = False
        else:
            groups.append([part])
            open_for_more = part.mixes
    return _named(groups, order, fixed)


def _named(groups: Sequence[list[_Part]], order: Mapping[ir.Node, int], fixed: Names) -> tuple[Layer, ...]:
    known = {v.name: v for n in order for v in (*n.inputs, *n.outputs) if v is not None and v.name}
    found: list[Layer] = []
    for number, parts in enumerate(groups):
        nodes = tuple(sorted(frozenset().union(*(p.nodes for p in parts)), key=order.__getitem__))
        heavy = [node for node in nodes if _weighs(node, fixed)]
        begin = parts[0].begin
        following = groups[number + 1][0].begin if number + 1 < len(groups) else ""
        end = _end(parts[-1].end, following, known, order, fixed)
        found.append(Layer(name=common_scope(heavy), begin=begin, end=end, nodes=nodes))
    names = [layer.name for layer in found]
    clash = len(set(names)) < len(names) or any(a != b and b.startswith(f"{a}.") for a in names for b in names)
    if not clash:
        return tuple(found)
    return tuple(
        Layer(name=f"layer {number}", begin=layer.begin, end=layer.end, nodes=layer.nodes)
        for number, layer in enumerate(found)
    )


def _end(end: str, following: str, known: Mapping[str, ir.Value], order: Mapping[ir.Node, int], fixed: Names) -> str:
    """Return the output of a layer: the next layer's input if that is this output or its normalization."""
    if not following or following == end:
        return end
    inside = _inside(known[following], known[end], order)
    return following if inside is not None and not any(_weighs(n, fixed) for n in inside) else end


def _parts(
    model: ir.Model, order: Mapping[ir.Node, int], shapes: Mapping[str, tuple[int, ...]], fixed: Names
) -> list[_Part]:
    carriers = trainable(model).carriers | {v.name or "" for v in model.graph.inputs}
    ends: dict[str, _Part] = {}
    for node in model.graph:
        operands = [v for v in node.inputs[:2] if v is not None and v.name] if node.op_type in SUMS else []
        if len(operands) < 2 or any(v.name in fixed or v.name not in carriers for v in operands):
            continue
        sizes = {shapes.get(v.name or "") for v in operands}
        if len(sizes) > 1 or None in sizes:
            continue
        for skip, branch in (operands, operands[::-1]):
            found = _part(node, skip, branch, order, ends, fixed)
            if found is not None:
                before = ends.get(skip.name or "")
                if before is not None and before.begin == found.begin:
                    del ends[before.end]
                ends[found.end] = found
                break
    return sorted(ends.values(), key=lambda part: max(order[n] for n in part.nodes))


def _part(
    node: ir.Node,
    skip: ir.Value,
    branch: ir.Value,
    order: Mapping[ir.Node, int],
    ends: Mapping[str, _Part],
    fixed: Names,
) -> _Part | None:
    """Return the part that a sum ends: the branch starts at `skip`, or where the part that ends at `skip` starts."""
    end = _sum(node)
    inside = _inside(branch, skip, order)
    if inside is not None and any(_weighs(n, fixed) for n in inside):
        return _Part(skip.name or "", end, inside | {node})
    before = ends.get(skip.name or "")
    if before is None:
        return None
    start = next((v for n in before.nodes for v in n.inputs if v is not None and v.name == before.begin), None)
    inside = _inside(branch, start, order) if start is not None else None
    if inside is None or not any(_weighs(n, fixed) for n in inside):
        return None
    return _Part(before.begin, end, inside | before.nodes | {node})


def _sum(node: ir.Node) -> str:
    place = SUMS[node.op_type]
    plain = node.outputs[place] if place < len(node.outputs) else None
    return (plain.name if plain is not None and plain.name else None) or key(node)


def _inside(last: ir.Value, first: ir.Value, order: Mapping[ir.Node, int]) -> frozenset[ir.Node] | None:
    """Return the nodes between two tensors; None if the last does not depend on the first."""
    maker = first.producer()
    limit = order.get(maker, -1) if maker is not None else -1
    queue, seen, met = [last], set(), last is first
    while queue:
        value = queue.pop()
        node = value.producer()
        if node is None or node in seen or order.get(node, -1) <= limit:
            continue
        seen.add(node)
        for operand in node.inputs:
            beside = operand is not None and maker is not None and operand.producer() is maker
            if operand is first or beside:  # a fused sum and normalization outputs both
                met = True
            elif operand is not None:
                queue.append(operand)
    return frozenset(seen) if met else None


def _weighs(node: ir.Node, fixed: Names) -> bool:
    """Return True if a node multiplies by a weight."""
    return node.op_type in LINEAR | WEIGHTED and any(v is not None and v.name in fixed for v in node.inputs)
