"""Find the node that caused a refusal: often not the node at which tied channels are noticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxgrail.core import Ints, Refusal

TIED = "all positions depend on each other, so none can go alone"
PIECES = "go only in pieces that would not leave a rectangular tensor"
UNALIGNED = "do not line up one to one"
SYMPTOMS = (TIED, PIECES, UNALIGNED)  # symptoms of channels that were tied together at another node


def cause(stuck: Refusal, producers: Sequence[Ints], ties: Mapping[int, Refusal]) -> Refusal:
    """Return the tie that merged all channels of a weight, if the refusal names only a symptom; else the refusal.

    Args:
        stuck: the refusal as first recorded.
        producers: per weight that produces the channels, the label class of every position.
        ties: by class, the last tie before the class became permanent.
    """
    if not any(symptom in stuck.reason for symptom in SYMPTOMS):
        return stuck
    whole = {int(roots[0]) for roots in producers if roots.size > 1 and (roots == roots[0]).all()}
    return next((ties[root] for root in sorted(whole) if root in ties), stuck)
