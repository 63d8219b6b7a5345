"""Measures per kind of output: each converts a batch to sums per sample, and sums over samples to values."""

from __future__ import annotations

from onnxgrail.core import Floats
from onnxgrail.fidelity.kinds.part import Part
from onnxgrail.fidelity.measures.measure import Batch, Measure
from onnxgrail.fidelity.measures.scores import CLASSES, FAINT, HIGHEST, SCORES, SEQUENCES, TOKENS, active
from onnxgrail.fidelity.measures.text import TEXT
from onnxgrail.fidelity.measures.values import BOXES, CENTERED, CHANGES, EMBEDDING, LABELS, NUMBERS, UNREAD, VALUES

__all__ = ["MEASURES", "SCALES", "Batch", "Measure", "active", "measure_of", "unread"]

MEASURES = {
    "classes": CLASSES,
    "scores": SCORES,
    "tokens": TOKENS,
    "sequences": SEQUENCES,
    "text": TEXT,
    "labels": LABELS,
    "embedding": EMBEDDING,
    "values": VALUES,
    "state": VALUES,
}
SCALES = {
    **{kind: measure.scale for kind, measure in MEASURES.items()},
    "boxes": BOXES.scale,
    "points": CENTERED.scale,
    "numbers": NUMBERS.scale,
    "changes": CHANGES.scale,
}


def measure_of(part: Part, table: Floats) -> Measure:
    """Return the measure of a part of an output, given its sums per sample.

    Scores of which none is above 0.5 need another one, and so do boxes whose scores are known.
    """
    measure = MEASURES[part.kind]
    if unread(part, table):
        return FAINT if measure is SCORES else UNREAD
    if measure is SCORES and not table[:, 3:5].any():
        return HIGHEST
    if measure is VALUES and table.shape[1] > 2:
        return BOXES
    if part.center is None:
        return CHANGES if part.changes else measure
    return CENTERED if part.units is None else NUMBERS


def unread(part: Part, table: Floats) -> bool:
    """Return True if no sample has a score above 0.1, neither of the scores themselves nor beside boxes."""
    return (part.kind == "scores" or (part.kind == "values" and table.shape[1] > 2)) and not table[:, 1].any()
