"""Predicts time, memory and disk space of a run: work counted from shapes, at speeds measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from onnxgrail.allocation.balance import by_units
from onnxgrail.allocation.choose import by_ratio, given
from onnxgrail.allocation.ladders import Widths
from onnxgrail.allocation.losses import measures
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Block, Recipe
from onnxgrail.machine.amounts import target_of
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.forecast.room import disk_of, memory_of
from onnxgrail.narrowing.forecast.searching import USUAL, of_search, searched_bytes
from onnxgrail.narrowing.forecast.speed import measured
from onnxgrail.narrowing.forecast.work import Work, fits_of, of_run, of_turning
from onnxgrail.narrowing.rotation import turnable
from onnxgrail.recipe.selection import selected

SEARCHED, TARGET = 0.1, USUAL  # shares of the units that a search removes, and a target whose share is not known
MINUTE, HOUR = 60, 3600  # seconds
CHECKS = 2.0  # runs of both networks on the samples that judge


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The time, memory and disk space that a run is expected to take from its start to its end.

    Attributes:
        seconds: with the seconds that are over already.
        memory: bytes of resident memory at the peak.
        disk: bytes that are written.
    """

    seconds: float
    memory: int
    disk: int

    @property
    def told(self) -> str:
        """Return it in words."""
        return f"about {_time(self.seconds)}, {_size(self.memory)} of memory and {_size(self.disk)} on disk"


def foretell(prepared: Prepared, job: Job) -> None:
    """Tell what is expected of a run, and keep it for the report."""
    found, quantize = expected(prepared, job), job.recipe.quantize
    more = "" if quantize == "none" else f"; the time of --quantize {quantize} is not included"
    job.clock.expect(found.told + more, asdict(found))


def expected(prepared: Prepared, job: Job) -> Expected:
    """Return what is expected of a run of which the model has been read and traced."""
    recipe, over = job.recipe, sum(job.clock.seconds.values())
    blocks = selected(prepared.survey.blocks, recipe)
    widths = _widths(prepared, recipe, blocks)
    left = {b: widths[b.name] / b.units for b in blocks if widths[b.name] < b.units}
    stages = fits_of(prepared, recipe, widths)
    work = of_run(prepared, recipe, left, stages)
    found, searches = turnable(prepared, recipe), recipe.max_loss is not None or measures(prepared, recipe)
    if searches:
        work += of_search(prepared, recipe, blocks, found, work)
    if found is not None:
        work += of_turning(prepared, found)
    judged = prepared.judges.samples / max(prepared.batches.samples, 1)
    work += Work(passes=CHECKS * judged if recipe.check else 0.0)
    seconds = over + measured(prepared, recipe).seconds(work)  # first: it adds to the peak of the memory
    memory = memory_of(prepared, recipe, list(left), stages)
    memory += searched_bytes(prepared, blocks, found) if searches else 0
    return Expected(seconds=round(seconds, 1), memory=memory, disk=disk_of(prepared, job, widths))


def _widths(prepared: Prepared, recipe: Recipe, blocks: Sequence[Block]) -> Widths:
    """Return widths like those that the run will choose; a search and absolute targets may choose quite others."""
    if recipe.widths is not None:
        return given(prepared.survey.blocks, blocks, recipe.widths)
    if recipe.ratio is not None:
        return by_ratio(prepared, blocks, recipe.ratio, recipe.round_to)
    budget, share = target_of(recipe), SEARCHED if recipe.max_loss is not None else TARGET
    share = 1 - budget.share if budget is not None and budget.share is not None else share
    return by_units(blocks, share if recipe.unit_ratio is None else recipe.unit_ratio, recipe.round_to)


def _time(seconds: float) -> str:
    """Format seconds: 31 s, 4 min, 2.5 h."""
    if seconds < 2 * MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / MINUTE:.0f} min" if seconds < 2 * HOUR else f"{seconds / HOUR:.1f} h"


def _size(size: int) -> str:
    """Format bytes: 812 kB, 3 MB, 1.5 GB."""
    for limit, letter in ((1e9, "GB"), (1e6, "MB")):
        if size >= limit:
            return f"{size / limit:.3g} {letter}"
    return f"{size / 1e3:.0f} kB"
