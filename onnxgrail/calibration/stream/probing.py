"""Probes in the tensors of one batch: which rows count there, and which probes are one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.devices.lanes import Lane
from onnxgrail.calibration.stream.experts import experts_of, hidden
from onnxgrail.calibration.stream.totals import Part
from onnxgrail.core import Array, Bools, Feed, Ints, Probe
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.labels import Mark
from onnxgrail.graph.trace.survey import Ledger, Survey


def placed(probe: Probe, marks: Sequence[Mark], ledger: Ledger) -> Probe:
    """The probe with positions counted in a tensor as it is now: other blocks may have left its axis already."""
    for mark in marks:
        if mark.axes == (probe.axis,) and ledger.dead[mark.labels].any():
            place = np.cumsum(~ledger.dead[mark.labels]) - 1
            return replace(probe, index=place[probe.index])
    return probe


Reader = Callable[[Feed, Bools | None], Iterator[Part]]
"""What a probe reads of one batch, given the padding mask."""


def reader(probe: Probe, model: ir.Model, survey: Survey, ledger: Ledger, lane: Lane) -> Reader:
    """How a probe is read in the network as the ledger has it."""
    if not probe.inside:
        some = [(n, placed(probe, survey.marks.get(n, ()), ledger)) for n in (probe.value, *probe.also)]
        return lambda found, mask: parts(found, some, mask)
    node = next(node for node in model.graph if key(node) == probe.inside[0])
    experts, flat = experts_of(node, model, survey, ledger), replace(probe, axis=1)

    def read(found: Feed, mask: Bools | None) -> Iterator[Part]:
        if not all(name in found for name in experts.inputs):  # in a branch that is not taken
            return
        for rows in hidden(experts, {n: lane.host(found[n]) for n in experts.inputs}, mask):
            yield rows, flat, None

    return read


Joint = Callable[[Feed, Feed, Bools | None], Iterator[Part]]
"""The same of two networks at once: features of the first, then those of the second."""


def joint(
    probe: Probe, kept: Ints, model: ir.Model, survey: Survey, before: Ledger, after: Ledger, lane: Lane
) -> Joint:
    """How a probe is read in front of a fold and behind it, of which the units `kept` are left."""
    if probe.inside:
        first, second = (reader(probe, model, survey, ledger, lane) for ledger in (before, after))

        def inside(old: Feed, new: Feed, mask: Bools | None) -> Iterator[Part]:
            for (left, _, _), (right, _, _) in zip(first(old, mask), second(new, mask), strict=True):
                index = np.concatenate([probe.index, probe.index[kept] + left.shape[1]])
                yield np.concatenate([left, right], axis=1), replace(probe, axis=1, index=index), None

        return inside

    def read(old: Feed, new: Feed, mask: Bools | None) -> Iterator[Part]:
        for name in (n for n in (probe.value, *probe.also) if n in old):
            marks = survey.marks.get(name, ())
            folded = placed(probe, marks, after).index[kept] + old[name].shape[probe.axis]
            index = np.concatenate([placed(probe, marks, before).index, folded])
            both = lane.concatenate([old[name], new[name]], axis=probe.axis)
            yield both, replace(probe, index=index), rows_of(both, probe, mask)

    return read


def parts(found: Feed, probes: Sequence[tuple[str, Probe]], mask: Bools | None) -> Iterator[Part]:
    """A probe's tensors, as far as the batch comes to them, with the rows that count."""
    for name, probe in ((n, p) for n, p in probes if n in found):
        yield found[name], probe, rows_of(found[name], probe, mask)


def names(probes: Sequence[Probe]) -> list[str]:
    """The tensors of some probes."""
    return sorted({n for p in probes for n in (p.value, *p.also, *p.inside[1:])})


def same(probe: Probe) -> tuple[object, ...]:
    """What two probes with equal sums have in common."""
    where = (probe.value, probe.also, probe.axis, probe.inside)
    return (*where, probe.pooled, probe.alone, probe.index.shape, probe.index.tobytes())


def paired(probe: Probe, kept: Ints) -> Probe:
    """A probe of u + k units."""
    return replace(probe, index=np.concatenate([probe.index, probe.index[kept]]))


def rows_of(x: Array, probe: Probe, mask: Bools | None) -> Bools | None:
    """The padding mask where it fits the tensor's leading axes: (batch, sequence, channels) or flattened."""
    if mask is None or probe.axis != x.ndim - 1:
        return None
    leading = x.shape[:-1]
    return np.asarray(mask).ravel() if leading in (mask.shape, (mask.size,)) else None
