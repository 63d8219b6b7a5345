"""What a refusal says: the node at which channels turned out to be one unit is seldom the one that made them one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxgrail.core import Ints, Refusal

TIED = "all positions depend on each other, so none can go alone"
PIECES = "go only in pieces that would not leave a rectangular tensor"
UNALIGNED = "do not line up one to one"
SYMPTOMS = (TIED, PIECES, UNALIGNED)  # what is seen of channels that became one unit elsewhere


def cause(stuck: Refusal, producers: Sequence[Ints], ties: Mapping[int, Refusal]) -> Refusal:
    """The tie that made one unit of all channels of a weight, where the refusal only names a symptom of that.

    Args:
        stuck: the refusal as it was first given.
        producers: per weight that makes the channels, the class of every position.
        ties: by class, the last tie before it became permanent.
    """
    if not any(symptom in stuck.reason for symptom in SYMPTOMS):
        return stuck
    whole = {int(roots[0]) for roots in producers if roots.size > 1 and (roots == roots[0]).all()}
    return next((ties[root] for root in sorted(whole) if root in ties), stuck)
