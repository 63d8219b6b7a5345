"""Which tensors of a model that was narrowed elsewhere stand for the block outputs of the dense one."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.cuts.chunks import chunks
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.fittable.trainable import trainable
from onnxgrail.graph.trace.facts import Facts


def aliases(dense: ir.Model, facts: Facts, small: ir.Model, own: Facts) -> dict[str, str]:
    """Dense name -> name in the small model, where names alone do not tell.

    Names are trusted where at least half of the block outputs are found by name with the shape they have in the dense
    model.  Otherwise blocks are paired in order, if both models have equally many and all their outputs agree in shape.
    Where neither holds the answer is empty, and blocks that cannot be told apart are fitted together.
    """
    wanted, there = _ends(dense, facts), _ends(small, own)
    named = [n for n in wanted if n in own.shapes and own.shapes[n] == facts.shapes.get(n)]
    if not wanted or 2 * len(named) >= len(wanted) or len(wanted) != len(there):
        return {}
    pairs = dict(zip(wanted, there, strict=True))
    return pairs if all(facts.shapes.get(a) == own.shapes.get(b) for a, b in pairs.items()) else {}


def _ends(model: ir.Model, facts: Facts) -> list[str]:
    """Outputs of all blocks but the last."""
    alive = lives(model, facts, [1] * len(list(model.graph)))
    return [chunk.last for chunk in chunks(model, trainable(model), alive)][:-1]
