"""Probes in the tensors of one batch: which rows count there, and which probes are one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from onnxgrail.calibration.totals import Part
from onnxgrail.core import Array, Bools, Feed, Ints, Probe
from onnxgrail.graph.labels import Mark
from onnxgrail.graph.survey import Ledger


def placed(probe: Probe, marks: Sequence[Mark], ledger: Ledger) -> Probe:
    """The probe with positions counted in a tensor as it is now: other blocks may have left its axis already."""
    for mark in marks:
        if mark.axes == (probe.axis,) and ledger.dead[mark.labels].any():
            place = np.cumsum(~ledger.dead[mark.labels]) - 1
            return replace(probe, index=place[probe.index])
    return probe


def parts(found: Feed, probes: Sequence[tuple[str, Probe]], mask: Bools | None) -> Iterator[Part]:
    """A probe's tensors, as far as the batch comes to them, with the rows that count."""
    for name, probe in ((n, p) for n, p in probes if n in found):
        yield found[name], probe, rows_of(found[name], probe, mask)


def names(probes: Sequence[Probe]) -> list[str]:
    """The tensors of some probes."""
    return sorted({n for p in probes for n in (p.value, *p.also)})


def same(probe: Probe) -> tuple[object, ...]:
    """What two probes with equal sums have in common."""
    return (probe.value, probe.also, probe.axis, probe.pooled, probe.alone, probe.index.shape, probe.index.tobytes())


def paired(probe: Probe, kept: Ints) -> Probe:
    """A probe of u + k units."""
    return replace(probe, index=np.concatenate([probe.index, probe.index[kept]]))


def rows_of(x: Array, probe: Probe, mask: Bools | None) -> Bools | None:
    """The padding mask where it fits the tensor's leading axes: (batch, sequence, channels) or flattened."""
    if mask is None or probe.axis != x.ndim - 1:
        return None
    leading = x.shape[:-1]
    return np.asarray(mask).ravel() if leading in (mask.shape, (mask.size,)) else None
