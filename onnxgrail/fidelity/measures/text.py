"""The measure of lines of text, of which a model gives the letters at each step, as for CTC."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxgrail.core import Floats, Ints
from onnxgrail.fidelity.kinds.part import ACTIVE, probabilities
from onnxgrail.fidelity.kinds.read import columns_last
from onnxgrail.fidelity.measures.measure import Batch
from onnxgrail.fidelity.measures.scores import SEQUENCES


def _text(batch: Batch) -> Floats:
    """Compute the difference of letters over the whole line, its equality in both models, and 1.

    A line is right or wrong as a whole: with ten letters, a hundredth of each is a tenth of the lines. Steps at which
    neither model sees a letter do not count, however many they are.
    """
    part = batch.part
    sides = [probabilities(columns_last(values, part), part.form) for values in (batch.a, batch.b)]
    p, q = (side.reshape(len(side), -1, side.shape[-1]) for side in sides)
    equal = [
        np.array_equal(_read(a, part.dominant), _read(b, part.dominant))
        for a, b in zip(p.argmax(axis=2), q.argmax(axis=2), strict=True)
    ]
    letters = np.arange(p.shape[2]) != part.dominant
    p, q = p[..., letters], q[..., letters]
    far = np.abs(p - q).sum(axis=(1, 2), where=np.maximum(p, q) > ACTIVE)
    return np.stack([np.minimum(far, 1.0), np.array(equal, np.float64), np.ones(len(far))], axis=1)


def _read(labels: Ints, blank: int | None) -> Ints:
    """Return the letters of a line (Graves et al. 2006, Connectionist Temporal Classification, section 3.1)."""
    begins = np.append(True, labels[1:] != labels[:-1])
    return np.asarray(labels[begins & (labels != blank)])


TEXT = replace(
    SEQUENCES,
    name="equal lines of text",
    loss="difference of letters above 0.1, summed over the line, at most 1",
    table=_text,
    scale=0.5,
)
