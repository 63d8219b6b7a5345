"""Cut weights that are kept as integers: they stay integers, under the same nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.errors import RewriteError
from onnxgrail.graph.assign import set_operand
from onnxgrail.graph.stored import Load, Stored
from onnxgrail.graph.survey import Ledger, Operand, Survey

User = tuple[ir.Node, int, Operand]


def cut_stored(
    graph: ir.Graph, stored: Stored, users: Sequence[User], survey: Survey, ledger: Ledger, captured: Collection[str]
) -> set[ir.Value]:
    """Narrow the parts of one stored weight for its users; the values that they no longer read.

    Raises:
        RewriteError: a part has no value.
    """
    operand = users[0][2]
    keep = {axis: ~ledger.dead[units] for axis, units in operand.units.items() if ledger.dead[units].any()}
    replaced: set[ir.Value] = set()
    for holder in _holders(graph, stored, users):
        parts = stored.cut(_load(holder, survey), keep, ledger.arrays.get(operand.param))
        for position, array in parts.items():
            old = set_operand(graph, (holder, position), array, captured)
            replaced |= set() if old is None else {old}
        if stored.held:
            shape = [int(keep[a].sum()) if a in keep else size for a, size in enumerate(stored.shape)]
            holder.outputs[0].shape = ir.Shape(shape)
    return replaced


def _holders(graph: ir.Graph, stored: Stored, users: Sequence[User]) -> list[ir.Node]:
    """The nodes whose inputs are the parts; a holder that others read too is copied for these users."""
    if not stored.held:
        return [node for node, _, _ in users]
    mine = {(node, position) for node, position, _ in users}
    found: dict[ir.Value, list[tuple[ir.Node, int]]] = {}
    for node, position, _ in users:
        value = node.inputs[position]
        assert value is not None
        found.setdefault(value, []).append((node, position))
    holders = []
    for value, places in found.items():
        holder = value.producer()
        if holder is None:
            raise RewriteError(f"nothing makes {value.name} out of its integers")
        if value.is_graph_output() or any((use.node, use.idx) not in mine for use in value.uses()):
            holder = _copy(graph, holder)
            for node, position in places:
                node.replace_input_with(position, holder.outputs[0])
        holders.append(holder)
    return holders


def _copy(graph: ir.Graph, node: ir.Node) -> ir.Node:
    name = f"{node.outputs[0].name}/narrowed"
    copy = ir.Node(node.domain, node.op_type, list(node.inputs), list(node.attributes.values()), name=name)
    copy.outputs[0].name = name
    copy.outputs[0].type = node.outputs[0].type
    graph.insert_after(node, copy)
    return copy


def _load(holder: ir.Node, survey: Survey) -> Load:
    values = {v.name: v for v in holder.inputs if v is not None}

    def load(name: str) -> Array:
        value = values[name]
        if value.const_value is not None:
            return value.const_value.numpy()
        if name not in survey.facts.values:
            raise RewriteError(f"the constant {name} has no value")
        return survey.facts.values[name]

    return load
