"""Count the multiply-accumulates of a model that was not prepared."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxgrail.calibration.branching import look_once
from onnxgrail.calibration.feeds.signature import samples_of, signature_of
from onnxgrail.core import Feed
from onnxgrail.errors import ModelError
from onnxgrail.graph.cost import counting
from onnxgrail.graph.trace.facts import bodies, key
from onnxgrail.graph.trace.tracer import trace

# Ops that multiply, but that `cost.macs` does not count: a model with them would seem lighter than it is.
UNCOUNTED = frozenset({
    "QGemm", "Attention", "QAttention", "MultiHeadAttention", "GroupQueryAttention", "Einsum",
})  # fmt: skip


def counted_macs(model: ir.Model, feed: Feed, providers: Sequence[str]) -> int | None:
    """Return the multiply-accumulates per sample of `feed`; None if they cannot be counted."""
    try:
        flat, facts = look_once(model, feed, providers)
    except ModelError:
        return None
    if any(node.op_type in UNCOUNTED for node in flat.graph):
        return None
    survey = trace(flat, facts)
    if any(bodies(node) and key(node) not in survey.repeated for node in flat.graph):
        return None
    return counting.macs(flat, survey) // samples_of(feed, signature_of(model))
