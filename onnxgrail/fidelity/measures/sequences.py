"""The measure of sequences of symbols that a model writes one by one, each from those before it."""

from __future__ import annotations

import numpy as np

from onnxgrail.core import Floats
from onnxgrail.fidelity.measures.measure import Batch, Measure, nothing_more, share


def _sequences(batch: Batch) -> Floats:
    """Compute the total variation of the whole sequence, its equality in both models, and 1.

    One other symbol changes all that follow, so sequences are compared as a whole. By the chain rule, two models write
    different sequences with a probability of at most the sum of the total variations of their steps. A row that one
    model lacks is another symbol.
    """
    p, q = (values.reshape(len(values), -1, values.shape[-1]) for values in (batch.a, batch.b))
    steps = np.maximum(p.sum(axis=2), q.sum(axis=2)) - np.minimum(p, q).sum(axis=2)
    equal = ((p.argmax(axis=2) == q.argmax(axis=2)) & (p.any(axis=2) == q.any(axis=2))).all(axis=1)
    return np.stack([np.minimum(np.maximum(steps, 0.0).sum(axis=1), 1.0), equal, np.ones(len(p))], axis=1)


SEQUENCES = Measure(
    name="equal sequences",
    higher=True,
    loss="total variation, summed over the steps",
    table=_sequences,
    value=lambda sums: share(sums[..., 1], sums[..., 2]),
    losses=lambda table: table[:, 0],
    scale=0.8,
    worst=lambda table: np.full(len(table), np.nan),
    details=nothing_more,
    trials=lambda sums: float(sums[2]),
    counted=True,
)
