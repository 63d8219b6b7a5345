"""Latency at any widths by a model fitted to measured kernels, and the check that a result is not slower."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from onnxgrail.allocation.measures import Measure, measure_of
from onnxgrail.allocation.timed import latencies
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime.timing import Times
from onnxgrail.core import Block, Bools, Floats, Recipe
from onnxgrail.graph.cost import counting
from onnxgrail.graph.cost.meter import Meter, Part
from onnxgrail.graph.cost.spare import Bridge, Spare, spares
from onnxgrail.graph.trace.facts import key
from onnxgrail.machine.job import Job
from onnxgrail.search.features import MOVES, PART, Features, Kind, Place, Sample
from onnxgrail.search.kernels import KERNELS, Kernels, measured_kernels

SLOWER = 0.95  # speed relative to the float form from which fewer bits count as slower
REFUSED = 0.98  # speed relative to the original from which a result is refused
LITTLE = 0.01  # milliseconds by which runs of the same model differ: where a session lies in memory decides as much
AGAIN = 3  # times that it must be measured as slower: other work on the machine can slow one session down for a while


def latency_of(prepared: Prepared, blocks: Sequence[Block], job: Job) -> tuple[Measure, str]:
    """Return the cost of widths by `modeled`, in multiply-accumulates if kernels cannot be measured, with its note."""
    measure, note = modeled(prepared, blocks, job)
    return measure_of(prepared, "macs") if measure is None else measure, note


def modeled(prepared: Prepared, blocks: Sequence[Block], job: Job) -> tuple[Measure | None, str]:
    """Measure the kernels of a model, once per run, and return the cost of widths in milliseconds with a note.

    Args:
        prepared: the model.
        blocks: those that may be narrowed.
        job: options and finished steps.

    Returns:
        The cost, and the share of the time that it attributes to nodes; None and the reason if kernels cannot be
        measured.
    """
    kernels = job.steps.once("kernels", lambda: measured_kernels(prepared, blocks, job.recipe), KERNELS)
    if not kernels.measured:
        return None, f"multiply-accumulates stand for latency: {kernels.note}"
    measure = latency_measure(prepared, kernels)
    note = f"latency is modeled: kernels of known nodes take {kernels.measured[0].share:.0%} of {measure.given:.2g} ms"
    return measure, note


def slower(prepared: Prepared, slim: ir.Model, recipe: Recipe) -> Times | None:
    """Measure a result and the original in turn; return the times of the result if it is slower beyond noise.

    A result that seems slower is measured again, in new sessions.

    Args:
        prepared: the original.
        slim: the result.
        recipe: the options; the providers are used.

    Raises:
        ModelError: ONNX Runtime does not run one of them.
    """
    after = None
    for _ in range(AGAIN):
        times = latencies((prepared.given, slim), prepared, recipe)
        if times is None:
            return None
        before, after = times
        if after.interval is None or after.interval[1] >= REFUSED or after.median <= before.median + LITTLE:
            return None
    return after


def latency_measure(prepared: Prepared, kernels: Kernels) -> Measure:
    """Return the cost of widths in milliseconds per run.

    The time of a node is linear in its multiply-accumulates and in the bytes that it reads and writes, both with
    channels as the kernel pads them. Coefficients are not negative, and are fitted per kind of kernel to all measured
    widths; then each node is scaled so that the model is exact at full widths. Time that belongs to no node is
    constant.

    Args:
        prepared: the model.
        kernels: measured on it, not empty.
    """
    full, survey = kernels.measured[0], prepared.survey
    features = Features(prepared, kernels.block, full)
    samples = [sample for one in kernels.measured for sample in features.samples(one) if sample.ms > 0]
    laws = _laws(samples)
    terms: dict[str, list[_Term]] = defaultdict(list)
    for sample in features.samples(full):
        if sample.ms > 0:
            of = laws[sample.place]
            known = features.kind_at(sample.node, sample.kind, None) == sample.kind
            terms[key(sample.node)].append(_Term(sample, of if known else {sample.kind: of[sample.kind]}))
    times = _Times(features, terms, _pace(samples))
    owner = counting.owners(survey)

    def blocks(nodes: Iterable[ir.Node]) -> tuple[int, ...]:
        units = (some for node in nodes for near in features.near(node) for some in counting.units_at(near, survey))
        return tuple(sorted(counting.owned(owner, units)))

    groups: dict[tuple[int, ...], list[ir.Node]] = defaultdict(list)
    for node in (node for node in prepared.model.graph if key(node) in terms):
        groups[blocks([node])].append(node)
    parts = [Part(some, partial(_saved, times, tuple(nodes))) for some, nodes in groups.items() if some]
    parts += [Part(blocks(one.nodes), partial(_spared, times, one)) for one in spares(prepared.model, survey)]
    meter = Meter(survey, parts)
    return Measure(full.ms - meter.saved({}), full.ms, meter)


@dataclass(frozen=True, slots=True, eq=False)
class _Term:
    """A kernel at full widths, and its coefficients by kind of kernel."""

    full: Sample
    laws: Mapping[Kind, Floats]


@dataclass(frozen=True, slots=True, eq=False)
class _Times:
    """The milliseconds of nodes, given the kernels of each by its key; `pace` as `_pace` gives it."""

    features: Features
    terms: Mapping[str, Sequence[_Term]]
    pace: float

    def full(self, node: ir.Node) -> float:
        """Return the time of a node at full widths."""
        return float(sum(term.laws[term.full.kind] @ term.full.features for term in self.terms.get(key(node), ())))

    def left(self, node: ir.Node, dead: Bools) -> float:
        """Return the time of a node without the dead units; without any, exactly that at full widths."""
        return float(sum(self._left(term, dead) for term in self.terms.get(key(node), ())))

    def _left(self, term: _Term, dead: Bools) -> float:
        node, full = term.full.node, term.full.kind
        laid = self.features.kind_at(node, full, dead)
        kind = laid if laid in term.laws else full
        left = term.laws[kind] @ self.features.of(node, kind, dead)
        return float(left + self.pace * self.features.moved(node, full, laid, dead))


def _saved(times: _Times, nodes: Sequence[ir.Node], dead: Bools) -> float:
    """Return the milliseconds that nodes with the same blocks save without the dead units."""
    return sum(times.full(node) - times.left(node, dead) for node in nodes)


def _spared(times: _Times, one: Spare, dead: Bools) -> float:
    """Return the milliseconds of a matrix that is not needed, or those that two convolutions take more than one.

    The one takes as long as that of several taps does with as many channels between them as it has on that side.
    """
    survey = times.features.survey
    if isinstance(one, Bridge):
        return sum(times.left(one.node, dead) for _ in one.shapes(survey, dead))
    *_, (made, read, *_) = one.shapes(survey, dead)
    alone = dead.copy()
    if one.block is not None:
        alone[one.block.ids] = np.arange(one.block.units) >= (read if one.taps is one.second else made)
    both = sum(times.left(node, dead) for node in one.nodes)
    return max(both - times.left(one.taps, alone), 0.0)


def _pace(samples: Sequence[Sample]) -> float:
    """Return milliseconds per byte to convert a part of a block.

    That is the time of measured conversions, of a part if there are some, or else of nodes that only read and write; 0
    if there are neither.
    """
    moves = [sample for sample in samples if sample.kind[0] == MOVES]
    plain = [s for s in moves if s.kind[1] == PART] or moves or [s for s in samples if not s.features[1]]
    both = 1 if moves else 2  # nodes count what they read, too
    return both * sum(sample.ms for sample in plain) / max(1.0, sum(float(sample.features[-1]) for sample in plain))


def _laws(samples: Sequence[Sample]) -> Mapping[Place, Mapping[Kind, Floats]]:
    """Return the coefficients of nodes at full widths by kind: those of all nodes of the kind, scaled to the node's."""
    kinds: dict[Kind, list[Sample]] = defaultdict(list)
    own: dict[Place, dict[Kind, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        kinds[sample.kind].append(sample)
        own[sample.place][sample.kind].append(sample)
    common = {kind: _fitted(samples) for kind, samples in kinds.items()}
    return {place: {k: _scaled(common[k], of) for k, of in by_kind.items()} for place, by_kind in own.items()}


def _fitted(samples: Sequence[Sample]) -> Floats:
    """Return the coefficients, not negative, with the least squared relative error."""
    from scipy.optimize import nnls  # slow to import, and only latency needs it

    rows = np.stack([sample.features / sample.ms for sample in samples])
    size = np.maximum(np.linalg.norm(rows, axis=0), np.finfo(np.float64).tiny)
    found: Floats = nnls(rows / size, np.ones(len(rows)))[0] / size
    return found


def _scaled(law: Floats, samples: Sequence[Sample]) -> Floats:
    """Scale coefficients to be exact for the first sample."""
    expected = float(law @ samples[0].features)
    return law * (samples[0].ms / expected) if expected else np.array([samples[0].ms, 0.0, 0.0])
