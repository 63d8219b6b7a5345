"""Chooses the widths of blocks under a budget, and measures the error of every block by its width."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from onnxgrail.allocation.choose import allocate, with_names
from onnxgrail.allocation.few import rungs_within
from onnxgrail.allocation.ladders import Cost
from onnxgrail.allocation.losses import Search, alone, curves_of, search_of, simple
from onnxgrail.allocation.measures import measure_of
from onnxgrail.allocation.result import Allocation, allocation_of, at_widths, of_allocation
from onnxgrail.allocation.statistics import NO_FILES, StatsFiles, impact_macs
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.dense import Dense
from onnxgrail.core import Block
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Codec
from onnxgrail.narrowing.bits.halves import halves_of
from onnxgrail.narrowing.bits.measuring import measuring
from onnxgrail.narrowing.bits.speed import slow_weights
from onnxgrail.narrowing.choosing import key
from onnxgrail.narrowing.searching import dense_of, limit_of, narrow_of, serves_twice, task_of
from onnxgrail.search.bits import cost_of, split
from onnxgrail.search.latency import latency_of
from onnxgrail.search.within import within

ALLOCATION = Codec(of_allocation, allocation_of)
CHEAP = 64, 5e12  # most blocks and multiply-accumulates for which error curves are measured by default


def allocated(
    prepared: Prepared, job: Job, blocks: Sequence[Block], allocation: Allocation, files: StatsFiles = NO_FILES
) -> tuple[Allocation, Dense | None]:
    """Compute the widths under a budget (given widths are kept if the recipe alone fixes them).

    Args:
        prepared: the model and its data.
        job: the run.
        blocks: the blocks that may be narrowed.
        allocation: the widths with which the blocks were proved.
        files: of statistics.

    Returns:
        The allocation, and the statistics of the original model if they also serve to decide the blocks, else None.
    """
    recipe, steps, clock = job.recipe, job.steps, job.clock
    given = simple(recipe)
    done = None if given else steps.known("allocation")
    with clock.stage("measure"):
        widths = allocation if done is None else allocation_of(done)
        over = (given or done is not None) and steps.finished(key(b) for b in blocks if widths.narrows(b))
        twice = serves_twice(prepared, recipe, files, blocks)
        dense = None if over and files.write is None else dense_of(prepared, job, blocks, files, twice=twice)
    if not given:
        with clock.stage("allocate"):
            search = search_of(prepared, job, blocks, narrow=narrow_of(recipe), dense=dense)
            rungs, why, sized = rungs_within(prepared, recipe)
            search = measuring(dataclasses.replace(search, rungs=rungs, job=dataclasses.replace(job, recipe=sized)))
            choose = allocate if recipe.max_loss is None else _searched
            allocation = steps.once("allocation", lambda: choose(search), ALLOCATION)
            note = "; ".join(filter(None, (allocation.note, why)))
            allocation = dataclasses.replace(allocation, note=note, block_size=sized.block_size if rungs else None)
    return allocation, dense if twice else None


def with_curves(prepared: Prepared, job: Job, blocks: Sequence[Block], allocation: Allocation) -> Allocation:
    """Return the allocation with the error of every block alone, at several widths."""
    search = search_of(prepared, job, blocks, narrow=narrow_of(job.recipe))
    return dataclasses.replace(allocation, curves=curves_of(alone(search)))


def cheap(prepared: Prepared, blocks: Sequence[Block]) -> bool:
    """Return True if error curves take about a minute at most: each block is tried alone, in the whole model."""
    most, macs = CHEAP
    return len(blocks) <= most and len(blocks) * impact_macs(prepared) <= macs


def _searched(search: Search) -> Allocation:
    """Return the widths that cost least within `max_loss`."""
    prepared, recipe, blocks = search.prepared, search.recipe, search.blocks
    search, measure = with_names(search, measure_of(prepared, recipe.minimize, bare=recipe.wants_size))
    cost: Cost = cost_of(measure, search.rungs) if search.rungs else measure
    note = ""
    if recipe.minimize == "latency":
        cost, note = latency_of(prepared, blocks, search.job.alone())
    if recipe.minimize in ("latency", "macs"):
        cost = _no_larger(prepared, cost)
    slow, _ = slow_weights(prepared, prepared.model, search.job, "before narrowing")
    spared = {**halves_of(prepared, recipe), **slow}
    widths, found = within(task_of(search, cost, limit_of(recipe), spared))
    widths, bits = split(prepared.paying(widths, cost))
    found = dataclasses.replace(found, spared=spared)
    done = at_widths(prepared, blocks, recipe, widths, widths)
    return dataclasses.replace(done, used="search", found=found, note=note, bits=bits)


def _no_larger(prepared: Prepared, cost: Cost) -> Cost:
    """Return a cost that is infinite where weights take more bytes than at full width: a stream's matrices may."""
    saved = measure_of(prepared, "size").meter.saved
    whole = saved({})
    return lambda widths: cost(widths) if saved(widths) >= whole else math.inf
