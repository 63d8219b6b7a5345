"""Report layers that the trace does not enter: bodies of Loop and Scan, and branches that no sample takes.

An If is not flattened if its branches return sequences, if it is in the body of a Loop, or if nothing was run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import onnx_ir as ir

from onnxgrail.core import Refusal
from onnxgrail.graph.attributes import written
from onnxgrail.graph.flatten.branches import SIDES, scope_of
from onnxgrail.graph.trace.facts import Branch, Facts, bodies, is_choice, key

LAYERS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "FusedMatMul", "MatMulNBits"})
BRANCHES = "its layers lie inside the branches of If {}: export each branch as a model of its own and compress that"
BODY = "its layers lie inside the body of {} {}, which is not followed"
UNTAKEN = "no sample takes the {} branch of If {}: give samples that do"


def unseen(model: ir.Model, node: ir.Node, facts: Facts) -> Refusal | None:
    """Return why a node's tensors are unknown: no sample takes the branch around it, or a branch it selects."""
    branch = _untaken(node, facts)
    return None if branch is None else _refusal(model, branch, key(node))


def layers_inside(model: ir.Model, facts: Facts) -> list[Refusal]:
    """Return a refusal for every body and branch with layers that the trace does not enter."""
    found = []
    branches: dict[Branch, set[str]] = defaultdict(set)
    for node in model.graph:
        weights = weights_inside(node)
        if weights:
            name = node.name or key(node)
            reason = BRANCHES.format(name) if node.op_type == "If" else BODY.format(node.op_type, name)
            found.append(Refusal(value=min(weights), node=name, op=node.op_type, reason=reason))
        branch = _untaken(node, facts) if node.op_type in LAYERS else None
        if branch is not None:
            branches[branch] |= _read(node, ())
    return [*found, *(_refusal(model, branch, min(names)) for branch, names in branches.items() if names)]


def weights_inside(node: ir.Node) -> set[str]:
    """Return the matrices and filters that layers in the bodies of a node read."""
    return {name for body in bodies(node) for name in _weights(body, _carried(node, body))}


def _untaken(node: ir.Node, facts: Facts) -> Branch | None:
    """Return the outermost branch around a node, or selected by it, that no sample takes; None if all are taken."""
    around = [*scope_of(node), *((key(node), side) for side in SIDES if is_choice(node))]
    return next((branch for branch in around if branch not in facts.taken), None)


def _refusal(model: ir.Model, branch: Branch, value: str) -> Refusal:
    node = next(node for node in model.graph if is_choice(node) and key(node) == branch[0])
    name = node.name or branch[0]
    return Refusal(value=value, node=name, op="If", reason=UNTAKEN.format(branch[1], name))


def _weights(body: ir.Graph, carried: Collection[str]) -> set[str]:
    """Return the matrices and filters that layers of a body read, from the body or the graph around it."""
    found = set()
    for node in body:
        if node.op_type in LAYERS:
            found |= _read(node, carried)
        for inner in bodies(node):
            found |= _weights(inner, carried)
    return found


def _carried(node: ir.Node, body: ir.Graph) -> set[str]:
    """Return inputs of a body that are weights in the first iteration: converters pass them on between iterations."""
    given: Iterable[ir.Value | None] = reversed(node.inputs)
    pairs = zip(reversed(body.inputs), given, strict=False)
    return {inner.name or "" for inner, outer in pairs if outer is not None and _is_weight(outer)}


def _read(node: ir.Node, carried: Collection[str]) -> set[str]:
    inputs = [value for value in node.inputs if value is not None and value.name]
    return {value.name or "" for value in inputs if value.name in carried or _is_weight(value)}


def _is_weight(value: ir.Value) -> bool:
    """Return True for a stored matrix or filter: an initializer or the value of a Constant node."""
    stored = value.const_value if value.is_initializer() else written(value.producer())
    return stored is not None and len(stored.shape) > 1
