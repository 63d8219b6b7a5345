"""Measures the frontier of a model: nested widths of growing loss, each decided and judged, with their costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnxgrail.allocation.choose import at_first
from onnxgrail.allocation.few import Bits, Rung, rungs_within, with_bits
from onnxgrail.allocation.ladders import Cost
from onnxgrail.allocation.losses import search_of
from onnxgrail.allocation.measures import Measure, measure_of
from onnxgrail.allocation.statistics import NO_FILES
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Block, Refusal
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.ready import ready
from onnxgrail.narrowing.searching import dense_of, limit_of, narrow_of, serves_twice, task_of
from onnxgrail.options import Metric
from onnxgrail.recipe import selection
from onnxgrail.search.bits import cost_of
from onnxgrail.search.candidates import Task
from onnxgrail.search.latency import modeled
from onnxgrail.search.points import Spot, spots_of

COUNTED: tuple[Metric, ...] = ("params", "macs", "size")
WIDTHS = "latency is that of the widths: fewer bits may be slower or faster"


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The size of a model and the time of one run.

    Attributes:
        params: elements of all weights.
        macs: multiply-accumulates per sample.
        bytes: of the file, external weights included.
        latency_ms: modeled on the kernels of this machine; None if they cannot be measured.
    """

    params: int
    macs: int
    bytes: int
    latency_ms: float | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Line:
    """The points of a frontier.

    Attributes:
        chosen: blocks that the recipe selects; refusals: those of them that did not pass the proof.
        before: the original model.
        spots: the points, by falling cost; costs: one per point.
        crossed: True if every sample was judged by a fit without it.
        note: on the latency.
    """

    chosen: tuple[Block, ...]
    refusals: tuple[Refusal, ...]
    before: Costs
    spots: tuple[Spot, ...]
    costs: tuple[Costs, ...]
    crossed: bool
    note: str


def line_of(prepared: Prepared, job: Job, count: int) -> Line:
    """Return the frontier of a model; its last point is near a loss of `max_loss`.

    Raises:
        DataError: no samples can judge a point.
    """
    chosen = selection.selected(prepared.survey.blocks, job.recipe)
    prepared, blocks, refusals = ready(prepared, job, chosen, at_first(prepared, chosen, job.recipe).widths)
    latency, note = modeled(prepared, blocks, job) if blocks else (None, "")
    minimize = job.recipe.minimize
    measure = latency if minimize == "latency" and latency is not None else measure_of(prepared, minimize)
    rungs, why, _ = rungs_within(prepared, job.recipe)
    cost = cost_of(measure, rungs) if rungs else measure
    some = bool(blocks or rungs)
    spots, crossed = spots_of(_task(prepared, job, blocks, cost, rungs), count) if some else ((), False)
    full = {b.name: b.units for b in blocks}
    return Line(
        chosen=chosen,
        refusals=refusals,
        before=_before(prepared, None if latency is None else latency(full)),
        spots=spots,
        costs=_costs(prepared, latency, rungs, [(spot.widths, spot.bits) for spot in spots]),
        crossed=crossed,
        note="; ".join(filter(None, (note, WIDTHS if rungs else why))),
    )


def _before(prepared: Prepared, latency: float | None) -> Costs:
    """Return the costs of the model as it was read."""
    params, macs, size = (round(measure_of(prepared, metric).given) for metric in COUNTED)
    return Costs(params=params, macs=macs, bytes=size, latency_ms=latency)


def _costs(
    prepared: Prepared, latency: Measure | None, rungs: Sequence[Rung], every: Sequence[tuple[Mapping[str, int], Bits]]
) -> tuple[Costs, ...]:
    """Return the costs at several widths and bits, as counting predicts them; a latency is that of the widths."""
    params, macs, size = (measure_of(prepared, metric) for metric in COUNTED)
    return tuple(
        Costs(
            params=round(params(widths)),
            macs=round(macs(widths)),
            bytes=round(with_bits(size, rungs, bits)(widths)),
            latency_ms=None if latency is None else float(latency(widths)),
        )
        for widths, bits in every
    )


def _task(prepared: Prepared, job: Job, blocks: Sequence[Block], cost: Cost, rungs: Sequence[Rung]) -> Task:
    """Measure the statistics of the original model, and return the search for points of its frontier."""
    with job.clock.stage("measure"):
        dense = dense_of(prepared, job, blocks, NO_FILES, twice=serves_twice(prepared, job.recipe, NO_FILES, blocks))
    search = search_of(prepared, job, blocks, narrow=narrow_of(job.recipe), dense=dense)
    return task_of(replace(search, rungs=tuple(rungs)), cost, limit_of(job.recipe))
