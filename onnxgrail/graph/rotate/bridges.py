"""Places that depend on the basis of a stream: a matrix of their own takes a change of basis, or nothing can."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Refusal
from onnxgrail.graph.attributes import given, moved_from, sole
from onnxgrail.graph.cost.counting import node_macs
from onnxgrail.graph.flatten.branches import stand_beside
from onnxgrail.graph.io.running.widen import has_bfloat16, true_types
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import free_name, hand_over
from onnxgrail.graph.rotate.layers import Slot, reading
from onnxgrail.graph.rotate.marked import BRIDGE
from onnxgrail.graph.rotate.streams import Stream, Wall
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.survey import Survey

CONVOLVED = (3, 4, 5)  # ranks of tensors that ONNX Runtime convolves
USABLE = 0.75  # share of the channels at which a stream with its matrices has to cost less than without
VIEWS = ("Transpose", "Identity", "Reshape", "Cast")  # of stored numbers


def as_in_file(model: ir.Model, facts: Facts) -> Facts:
    """Return facts with the types of the file, which new constants have: bfloat16 runs as float32."""
    if not has_bfloat16(model):
        return facts
    return replace(facts, dtypes={**facts.dtypes, **true_types(model)})


def refusal(stream: Stream, facts: Facts) -> Refusal | None:
    """Return why the basis of a stream stays, None if it can be changed."""
    walls, centered = walls_of(stream, facts), {norm.centered for norm in stream.norms}
    source = stream.norms[0].source.name or ""
    if len(centered) > 1:
        return Refusal(value=source, node="", op="", reason="layer and RMS normalizations read the same stream")
    for wall in walls:
        node, op = (
            ("", "output" if wall.ahead else "input")
            if wall.node is None
            else (wall.node.name or "", wall.node.op_type)
        )
        if not _takes_matrix(wall, facts) or (wall.value.is_graph_output() and not wall.ahead):
            return Refusal(value=source, node=node, op=op, reason="its result depends on the basis of the stream")
    return _dear(stream, walls, facts)


def _takes_matrix(wall: Wall, facts: Facts) -> bool:
    """Return True if a matrix can stand there: a product on the last axis, or a convolution of one tap."""
    rank = len(facts.shapes[wall.value.name or ""])
    return wall.axis == rank - 1 or (wall.axis == 1 and rank in CONVOLVED)


def _dear(stream: Stream, walls: Sequence[Wall], facts: Facts) -> Refusal | None:
    """Return a refusal if the matrices that walls need cost more than a narrower stream saves."""
    bare = Survey(blocks=(), refusals=(), facts=facts, marks={}, operands={}, ids=1)
    layers = [slot.node for slot in stream.slots if slot.operand == 1]
    saved = (1 - USABLE) * sum(node_macs(node, bare, None) for node in layers)
    added = USABLE * stream.width * sum(math.prod(facts.shapes[wall.value.name or ""]) for wall in walls)
    if saved > added or not walls:
        return None
    first = next((w.node for w in walls if w.node is not None), None)
    node, op = ("", "output") if first is None else (first.name or "", first.op_type)
    reason = (
        f"{len(walls)} places like this one depend on the basis of the stream, and with {USABLE:.0%} of its channels "
        f"their matrices add {added:,.0f} multiply-accumulates where {saved:,.0f} are saved"
    )
    return Refusal(value=stream.norms[0].source.name or "", node=node, op=op, reason=reason)


def walls_of(stream: Stream, facts: Facts) -> list[Wall]:
    """Return the places that need a matrix of their own: walls, and layers that share their weight."""
    readers: dict[ir.Value, list[Slot]] = {}
    for slot in stream.slots:
        if len(facts.shapes[slot.value.name or ""]) > 1:
            readers.setdefault(moved_from(slot.value, VIEWS), []).append(slot)
    places = {value: {(slot.node, slot.operand) for slot in same} for value, same in readers.items()}
    shared = [slot for v, same in readers.items() if len(places[v]) > 1 or _others(same) for slot in same]
    walls = {(w.value, w.node, w.ahead): w for w in (_on_last_axis(w, stream, facts) for w in stream.walls)}
    for slot in shared:
        value = given(slot.node, 0) if slot.reads else slot.node.outputs[0]
        axis = stream.tensors[value][0]
        walls[value, slot.node, slot.reads] = Wall(value, axis, slot.norm, slot.node, ahead=slot.reads)
    return list(walls.values())


def _on_last_axis(wall: Wall, stream: Stream, facts: Facts) -> Wall:
    """Return the wall of a node where what it computes has its channels on the last axis, if it all gets there."""
    value, axis = wall.value, wall.axis
    while not wall.ahead and axis != len(facts.shapes[value.name or ""]) - 1:
        after = sole(value)
        computed = [v for v in after.inputs if v is not None and v.name not in facts.constants] if after else []
        if after is None or after.outputs[0] not in stream.tensors or computed != [value]:
            return wall
        value = after.outputs[0]
        axis, _ = stream.tensors[value]
    return replace(wall, value=value, axis=axis)


def _others(same: Sequence[Slot]) -> bool:
    """Return True if anything else reads the stored numbers."""
    queue, seen = [moved_from(same[0].value, VIEWS)], set()
    places = {(slot.node, slot.operand) for slot in same}
    while queue:
        value = queue.pop()
        if value.is_graph_output():
            return True
        for use in value.uses():
            if (use.node, use.idx) in places:
                continue
            if use.node.op_type not in ("Transpose", "Identity", "Reshape", "Cast", "Shape"):
                return True
            if use.node not in seen and use.node.op_type != "Shape":
                seen.add(use.node)
                queue += use.node.outputs
    return False


def bridge(graph: ir.Graph, wall: Wall, facts: Facts, basis: str, *, layers: bool = True) -> Facts:
    """Insert a matrix, the identity, which takes the change of basis; return the facts with the new tensors.

    It is a product, or a convolution of one tap where the channels are not on the last axis.

    Args:
        graph: changed in place.
        wall: where the matrix is inserted.
        facts: of the graph.
        basis: name of the stream or table.
        layers: if layers, too, read what it computes instead of what a node computes. In a stream whose normalizations
            subtract a mean they must not: it is lost there.
    """
    value, name = wall.value, wall.value.name or ""
    shape, dtype = facts.shapes[name], facts.dtypes[name]
    last = wall.axis == len(shape) - 1
    numbers = np.eye(shape[wall.axis]).astype(dtype)
    numbers = numbers if last else numbers.reshape(*numbers.shape, *[1] * len(shape[2:]))
    eye = constant(graph, numbers, f"{name}/basis")
    op, label = "MatMul" if last else "Conv", free_name(graph, f"{name}/rebased")
    node = ir.Node("", op, [value, eye], num_outputs=1, name=label)
    node.metadata_props[BRIDGE] = basis
    if not wall.ahead:
        read = [use for use in value.uses() if use.node is not node]
        moved = [use for use in read if layers or reading(use.node, use.idx, wall.axis, None, facts) is None]
        follow(graph, node, value, [use.node for use in moved])
    else:
        follow(graph, node, value, [] if wall.node is None else [wall.node], output=wall.node is None)
    return with_layer(facts, (value, *node.outputs), shape, eye, numbers)


def with_layer(
    facts: Facts, tensors: Iterable[ir.Value], shape: tuple[int, ...], weight: ir.Value, numbers: Array
) -> Facts:
    """Return facts with what a new layer reads and makes, both of one shape, and its weight with these numbers."""
    found = {value.name or "": shape for value in tensors} | {weight.name or "": numbers.shape}
    return replace(
        facts,
        shapes={**facts.shapes, **found},
        dtypes={**facts.dtypes, **dict.fromkeys(found, numbers.dtype)},
        constants=facts.constants | {weight.name or ""},
    )


def follow(
    graph: ir.Graph, node: ir.Node, value: ir.Value, readers: Collection[ir.Node], *, output: bool = False
) -> None:
    """Insert a node that reads a value; these readers then read the node's output.

    Args:
        graph: changed in place.
        node: a new node with one output and a name.
        value: of which the node reads.
        readers: nodes that read the value.
        output: if the value is an output of the graph, the node's output takes its place and name.
    """
    fresh, maker = node.outputs[0], value.producer()
    fresh.name, fresh.type, fresh.shape = node.name, value.type, value.shape
    for reader, operand in [(use.node, use.idx) for use in value.uses() if use.node in readers]:
        reader.replace_input_with(operand, fresh)
    if maker is None:
        graph.insert_before(graph[0], node)
    else:
        stand_beside(node, maker)
        graph.insert_after(maker, node)
    if output and value.is_graph_output():
        hand_over(graph, value, fresh)
