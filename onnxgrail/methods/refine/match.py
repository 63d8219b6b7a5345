"""Matches tensors of a model narrowed by another tool to the block outputs of the dense model."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.cuts.chunks import chunks
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.fittable.trainable import trainable
from onnxgrail.graph.trace.facts import Facts


def aliases(dense: ir.Model, facts: Facts, small: ir.Model, own: Facts) -> dict[str, str]:
    """Return dense names to names in the small model, for tensors that names alone do not match.

    Names are trusted if at least half of the block outputs are found by name with the shape of the dense model.
    Otherwise blocks are paired in order, if both models have equally many and all their outputs agree in shape. Else
    the result is empty, and blocks that cannot be matched are fitted together.
    """
    wanted, there = _ends(dense, facts), _ends(small, own)
    named = [n for n in wanted if n in own.shapes and own.shapes[n] == facts.shapes.get(n)]
    if not wanted or 2 * len(named) >= len(wanted) or len(wanted) != len(there):
        return {}
    pairs = dict(zip(wanted, there, strict=True))
    return pairs if all(facts.shapes.get(a) == own.shapes.get(b) for a, b in pairs.items()) else {}


def _ends(model: ir.Model, facts: Facts) -> list[str]:
    """Return the outputs of all blocks except the last."""
    alive = lives(model, facts, [1] * len(list(model.graph)))
    return [chunk.last for chunk in chunks(model, trainable(model), alive)][:-1]
