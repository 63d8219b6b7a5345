"""Measures how close one model's outputs are to another's.

`sums` computes the distances that every output has, `kinds` detects the content of an output, `measures` has a measure
for each kind, and `tally` combines them batch by batch.
"""

from onnxgrail.fidelity.clues import Clues, clues_of
from onnxgrail.fidelity.result import Fidelity, Verdict, entries, finish
from onnxgrail.fidelity.sums import Distances, Sums, add_batch, looks_like_logits, measure, probable
from onnxgrail.fidelity.tally import Tally
from onnxgrail.fidelity.verdicts import headline

__all__ = [
    "Clues",
    "Distances",
    "Fidelity",
    "Sums",
    "Tally",
    "Verdict",
    "add_batch",
    "clues_of",
    "entries",
    "finish",
    "headline",
    "looks_like_logits",
    "measure",
    "probable",
]
