"""Functions that read probes in the tensors of one batch, select valid rows and find equal probes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

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
    """Return the probe with its channel indices adjusted to the tensor's current width, after earlier pruning."""
    for mark in marks:
        if mark.axes == (probe.axis,) and ledger.dead[mark.labels].any():
            place = np.cumsum(~ledger.dead[mark.labels]) - 1
            return replace(probe, index=place[probe.index])
    return probe


Reader = Callable[[Feed, Bools | None], Iterator[Part]]
"""Yields the parts that a probe reads from one batch, given the padding mask."""


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A traced graph, and the lane of its activations."""

    model: ir.Model
    survey: Survey
    lane: Lane


def reader(probe: Probe, network: Network, ledger: Ledger) -> Reader:
    """Return a function that reads the probe from the tensors of the network in the ledger's state."""
    model, survey = network.model, network.survey
    if not probe.inside:
        some = [(n, placed(probe, survey.marks.get(n, ()), ledger)) for n in (probe.value, *probe.also)]
        return lambda found, mask: parts(found, some, mask)
    node = next(node for node in model.graph if key(node) == probe.inside[0])
    experts, flat = experts_of(node, model, survey, ledger), replace(probe, axis=1)

    def read(found: Feed, mask: Bools | None) -> Iterator[Part]:
        if not all(name in found for name in experts.inputs):  # the node lies in a branch that this batch does not take
            return
        for rows in hidden(experts, {n: network.lane.host(found[n]) for n in experts.inputs}, mask):
            yield rows, flat, None

    return read


Joint = Callable[[Feed, Feed, Bools | None], Iterator[Part]]
"""Like `Reader`, for two networks at once: features of the first network, then features of the second."""


def joint(probe: Probe, kept: Ints, network: Network, before: Ledger, after: Ledger) -> Joint:
    """Return a function that reads a probe before and after a fold.

    Args:
        probe: the probe.
        kept: (k,) indices of the block's channels that the fold keeps.
        network: the graph.
        before: the ledger without the fold.
        after: the ledger with the fold.
    """
    if probe.inside:
        first, second = (reader(probe, network, ledger) for ledger in (before, after))

        def inside(old: Feed, new: Feed, mask: Bools | None) -> Iterator[Part]:
            for (left, _, _), (right, _, _) in zip(first(old, mask), second(new, mask), strict=True):
                index = np.concatenate([probe.index, probe.index[kept] + left.shape[1]])
                yield np.concatenate([left, right], axis=1), replace(probe, axis=1, index=index), None

        return inside

    def read(old: Feed, new: Feed, mask: Bools | None) -> Iterator[Part]:
        for name in (n for n in (probe.value, *probe.also) if n in old):
            marks = network.survey.marks.get(name, ())
            folded = placed(probe, marks, after).index[kept] + old[name].shape[probe.axis]
            index = np.concatenate([placed(probe, marks, before).index, folded])
            both = network.lane.concatenate([old[name], new[name]], axis=probe.axis)
            yield both, replace(probe, index=index), rows_of(both, probe, mask)

    return read


def parts(found: Feed, probes: Sequence[tuple[str, Probe]], mask: Bools | None) -> Iterator[Part]:
    """Yield the probe's tensors that this batch computes, each with its mask of valid rows."""
    for name, probe in ((n, p) for n, p in probes if n in found):
        yield found[name], probe, rows_of(found[name], probe, mask)


def names(probes: Sequence[Probe]) -> list[str]:
    """Return the names of all tensors that the probes read, sorted."""
    return sorted({n for p in probes for n in (p.value, *p.also, *p.inside[1:])})


def same(probe: Probe) -> tuple[object, ...]:
    """Return a key that is equal for probes with equal statistics."""
    where = (probe.value, probe.also, probe.axis, probe.inside)
    return (*where, probe.pooled, probe.alone, probe.few, probe.index.shape, probe.index.tobytes())


def paired(probe: Probe, kept: Ints) -> Probe:
    """Return the probe with u + k indices: its u channels, then the k channels `kept` again."""
    return replace(probe, index=np.concatenate([probe.index, probe.index[kept]]))


def rows_of(x: Array, probe: Probe, mask: Bools | None) -> Bools | None:
    """Return the padding mask if it fits the tensor, (batch, sequence, channels) or (rows, channels); else None."""
    if mask is None or probe.axis != x.ndim - 1:
        return None
    leading = x.shape[:-1]
    return np.asarray(mask).ravel() if leading in (mask.shape, (mask.size,)) else None
