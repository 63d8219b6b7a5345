"""The way of a cut, and cached activations with the channels that are left: they may be older than some decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxgrail.calibration.devices.lanes import Lane
from onnxgrail.core import Array, Bools, Feed
from onnxgrail.graph.trace.survey import Ledger, Survey


@dataclass(frozen=True, slots=True)
class Path:
    """The plan of a run: the new cut, the tensors cached there, those to compute, and those cached beyond the cut."""

    target: int
    keep: Sequence[str]
    missing: Sequence[str]
    beyond: Sequence[str]


def narrowing(
    survey: Survey, ledger: Ledger, dead: Mapping[str, Bools], names: Sequence[str], lane: Lane
) -> Callable[[Feed], dict[str, Array]]:
    """Return a function that cuts the cached tensors of a batch.

    Args:
        survey: marks say which channels are where.
        ledger: which channels are left now.
        dead: by cached tensor, which channels were gone when it was computed.
        names: of the cached tensors that are cut.
        lane: where tensors lie.
    """
    cuts: list[tuple[str, int, Bools]] = []
    for name in names:
        for mark in survey.marks.get(name, ()):
            gone = ledger.dead[mark.labels]
            there = ~dead[name][mark.labels] if name in dead else np.ones_like(gone)
            if gone[there].any():
                cuts.append((name, mark.axes[0], ~gone[there]))

    def cut(cache: Feed) -> dict[str, Array]:
        found = dict(cache)
        for name, axis, stays in (one for one in cuts if one[0] in found):
            found[name] = lane.compress(stays, found[name], axis=axis)
        return found

    return cut
