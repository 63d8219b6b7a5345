"""The inputs of an allocation, and the effect of narrowing each block alone in the original model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from onnxgrail.algebra.moments.curves import Narrow, error_curve, widths_measured
from onnxgrail.allocation import schedules
from onnxgrail.allocation.few import Bits, Rung
from onnxgrail.allocation.ladders import Cost, Ideal, Ladder, Widths, ladders_of
from onnxgrail.allocation.measures import Measure
from onnxgrail.allocation.result import Curve
from onnxgrail.allocation.statistics import impact
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.dense import Dense
from onnxgrail.calibration.streaming import of_blocks
from onnxgrail.core import Block, Floats, Recipe, View
from onnxgrail.graph.io.model_file import weight_bytes
from onnxgrail.graph.rewrite import weights
from onnxgrail.machine.amounts import target_of
from onnxgrail.machine.job import Job

SMALL = 2**29  # bytes of weights up to which a trial of every block is worth its time
LeastHarm = Callable[[Cost, float], Ideal]
"""Returns the schedule that loses least where a cost is within a limit, from measured losses."""
Way = tuple[Bits, Ideal | None]
"""The bits of weights in the order in which they were lowered, and the schedule of widths; None if no block narrows."""
Alone = tuple[Floats, float]
"""Relative squared error of a block's consumers by units kept, and the error of the outputs with half of it removed."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """Ways to a size that lose little.

    Attributes:
        found: first by the losses of single blocks and weights, then with as few bits as it takes before blocks narrow,
            and the first without layers that become two.
        least: returns the number of the candidate that loses least, from measured losses.
    """

    found: Sequence[Way]
    least: Callable[[Sequence[tuple[Widths, Bits]]], int]


Together = Callable[[Measure, float, float], Ways]
"""Returns ways, given the measure of a size, a share of the units near which losses matter, and the limit."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Search:
    """The inputs of an allocation.

    Attributes:
        prepared, job, blocks: the model, the run, the blocks that may be narrowed.
        ladders: of the blocks, in order of depth.
        dense: statistics of the original model if they are available.
        narrow: what becomes of a block at a width; `least_harm`: see `LeastHarm`.
        rungs: weights whose bits count for the size; together: see `Together`, None if losses are not measured.
    """

    prepared: Prepared
    job: Job
    blocks: tuple[Block, ...]
    ladders: tuple[Ladder, ...]
    dense: Dense | None
    narrow: Narrow
    least_harm: LeastHarm
    rungs: tuple[Rung, ...] = ()
    together: Together | None = None

    @property
    def recipe(self) -> Recipe:
        """Return the choices of the run."""
        return self.job.recipe

    def narrows(self, widths: Mapping[str, int]) -> bool:
        """Return True if a block loses units with these widths."""
        return any(widths.get(block.name, block.units) < block.units for block in self.blocks)


def simple(recipe: Recipe) -> bool:
    """Return True if widths follow from the recipe alone, block by block."""
    alone = recipe.unit_ratio is not None and recipe.allocate in ("auto", "uniform", "depth")
    limited = target_of(recipe) is not None or recipe.max_loss is not None
    return recipe.widths is not None or (not limited and (alone or recipe.keeps_everything))


def tells(prepared: Prepared, recipe: Recipe, most: int = SMALL) -> bool:
    """Return True if data are real, fits follow them, and the weights have at most so many bytes to try."""
    real = not prepared.batches.synthetic and recipe.compensate != "none"
    return real and weight_bytes(prepared.model) <= most


def measures(prepared: Prepared, recipe: Recipe) -> bool:
    """Return True if widths follow from measured losses."""
    return not simple(recipe) and tells(prepared, recipe) and recipe.allocate in ("auto", "global")


def search_of(
    prepared: Prepared,
    job: Job,
    blocks: Sequence[Block],
    *,
    narrow: Narrow,
    dense: Dense | None = None,
) -> Search:
    """Return a search with the ladders of its blocks; see `Search`. Without measurements the least harm is uniform."""
    ladders = ladders_of(blocks, job.recipe.round_to)
    return Search(
        prepared=prepared,
        job=job,
        blocks=tuple(blocks),
        ladders=ladders,
        dense=dense,
        narrow=narrow,
        least_harm=lambda *_: schedules.uniform(ladders),
    )


def evidence(search: Search, read: Callable[[View], T]) -> dict[str, T]:
    """Apply `read` to each block of the original model, by where they begin; return its results by block name."""
    prepared = search.prepared
    blocks = sorted(search.blocks, key=lambda block: block.span[0])
    nothing = weights.empty(prepared.survey)
    if search.dense is not None:
        pairs = iter([(b, search.dense[b.name]) for b in blocks])
    else:
        pairs = of_blocks(prepared, search.job.alone(), blocks)
    found = {}
    for block, stats in pairs:
        arrays = weights.read(block, prepared.model, prepared.survey, nothing)
        slopes = prepared.gradients.get(block.name)
        found[block.name] = read(View(block=block, weights=arrays, stats=stats, gradient=slopes))
    return found


def alone(search: Search) -> dict[str, Alone]:
    """Measure each block alone: its error at every width, and the error of the outputs with half of it removed."""

    def read(view: View) -> Alone:
        half = max(1, view.block.units // 2)
        narrow = search.narrow
        return error_curve(view, narrow.error), impact(search.prepared, search.recipe, narrow.change(view, half))

    found = evidence(search, read)
    return {one.name: found[one.name] for one in search.ladders}


def curves_of(found: Mapping[str, Alone]) -> tuple[Curve, ...]:
    """Return measurements of `alone` for a report, at the widths that were measured."""
    return tuple(_curve(name, *measurement) for name, measurement in found.items())


def _curve(name: str, errors: Floats, effect: float) -> Curve:
    units = len(errors) - 1
    points = tuple((kept, float(errors[kept])) for kept in widths_measured(units))
    return Curve(block=name, units=units, points=points, effect=effect)
