"""Bytes and rows of activations, estimated from the traced run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence

import numpy as np

from onnxgrail.algebra.moments.few_rows import KEPT, are_few
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Probe
from onnxgrail.graph.trace.survey import Ledger, Survey
from onnxgrail.machine.device import device_of


def scale_of(batches: Batches, survey: Survey) -> float:
    """Return how many times more data than in the traced run passes through the network over all batches."""
    first = batches.feeds[0]()
    return len(batches) * sum(a.nbytes for a in first.values()) / max(1, sum(map(survey.facts.bytes_of, first)))


def rows_per_sample(probe: Probe, survey: Survey, samples: int) -> float:
    """Return the number of rows that a probe reads in one of the `samples` of the traced run."""
    shape = survey.facts.shapes[probe.value]
    return math.prod(shape) / max(probe.width if probe.pooled else shape[probe.axis], 1) / samples


def rows_of_all(probe: Probe, prepared: Prepared) -> float:
    """Return the number of rows that a probe reads over all samples."""
    return rows_per_sample(probe, prepared.survey, prepared.samples) * prepared.batches.samples


def are_kept(probe: Probe, prepared: Prepared, providers: Sequence[str]) -> bool:
    """Return True if the rows of a probe are so few that keeping them costs less than products; never on a GPU."""
    plain = not probe.inside and not probe.also and device_of(providers).kind == "cpu"
    kind = prepared.survey.facts.dtypes.get(probe.value)
    return plain and kind in (np.float32, np.float16) and are_few(rows_of_all(probe, prepared), probe.width, KEPT)


def bytes_left(survey: Survey, name: str, ledger: Ledger, scale: float) -> int:
    """Estimate the bytes of a tensor over all batches of all processes, without the channels that are gone."""
    size = survey.facts.bytes_of(name) * scale
    for mark in survey.marks.get(name, ()):
        size *= float((~ledger.dead[mark.labels]).sum()) / max(1, mark.labels.size)
    return int(size)


def affordable(
    names: Sequence[str], held: Collection[str], size: Callable[[str], int], most: int, budget: int
) -> list[str]:
    """Return the leading tensors of `names` that fit into memory together with all tensors `held` at the same time.

    Cached tensors decide where later runs start, and so the last bits of their results.  The choice must not depend on
    the number of processes.

    Args:
        names: of tensors.
        held: names of tensors, of which some may be among `names`.
        size: returns the bytes of a tensor over all batches of all processes.
        most: bytes that all of `names` may take.
        budget: bytes that they and all others may take.
    """
    room = min(most, budget - sum(size(name) for name in held if name not in names))
    sizes = itertools.accumulate(map(size, names))
    return [name for name, total in zip(names, sizes, strict=True) if total <= room]
