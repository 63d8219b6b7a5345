"""Layers inside the bodies of If, Loop and Scan, which the trace does not enter: said once per node that has them."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.core import Refusal
from onnxgrail.graph.facts import bodies, key

LAYERS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "FusedMatMul", "MatMulNBits"})
BRANCHES = "its layers lie inside the branches of If {}: export each branch as a model of its own and compress that"
BODY = "its layers lie inside the body of {} {}, which is not followed"


def layers_inside(model: ir.Model) -> list[Refusal]:
    """A refusal for every node whose bodies hold layers with weights."""
    found = []
    for node in model.graph:
        weights = {name for body in bodies(node) for name in _weights(body)}
        if weights:
            name = node.name or key(node)
            reason = BRANCHES.format(name) if node.op_type == "If" else BODY.format(node.op_type, name)
            found.append(Refusal(value=min(weights), node=name, op=node.op_type, reason=reason))
    return found


def _weights(body: ir.Graph) -> set[str]:
    """Matrices and filters that layers of a body read, its own or those of the graph around it."""
    found = set()
    for node in body:
        if node.op_type in LAYERS:
            found |= {v.name for v in node.inputs if v is not None and v.name and _is_weight(v)}
        for inner in bodies(node):
            found |= _weights(inner)
    return found


def _is_weight(value: ir.Value) -> bool:
    stored = value.const_value if value.is_initializer() else None
    return stored is not None and len(stored.shape) > 1
