"""Chooses the widths of blocks under a budget, and measures the error of every block by its width."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from onnxgrail.algebra.fit.compensate import BEST
from onnxgrail.algebra.moments.curves import Narrow
from onnxgrail.algebra.select.selectors import SELECTORS
from onnxgrail.allocation.choose import allocate, at_widths, simple
from onnxgrail.allocation.losses import Search, alone, curves_of, search_of
from onnxgrail.allocation.measures import measure_of
from onnxgrail.allocation.result import Allocation, allocation_of, of_allocation
from onnxgrail.allocation.statistics import NO_FILES, StatsFiles, harm, impact_macs, known
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.dense import TOGETHER, Dense, size_of
from onnxgrail.core import Block, Change, Recipe, View
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Codec
from onnxgrail.narrowing.choosing import Run, decided, key, needs_data
from onnxgrail.narrowing.grail import bring_back, settle
from onnxgrail.search.candidates import Task
from onnxgrail.search.latency import latency_of
from onnxgrail.search.path import Cost
from onnxgrail.search.within import within

ALLOCATION = Codec(of_allocation, allocation_of)
PARTS = 4  # the data, their two halves and a part of one, of which a search keeps statistics
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
        twice = _serves_twice(recipe, files, blocks)
        dense = None if over and files.write is None else _dense(prepared, job, blocks, files, twice=twice)
    if not given:
        with clock.stage("allocate"):
            trial = functools.partial(_trial, prepared, job, blocks)
            search = search_of(prepared, job, blocks, narrow=_narrow(recipe), dense=dense, trial=trial)
            choose = allocate if recipe.max_loss is None else _searched
            allocation = steps.once("allocation", lambda: choose(search), ALLOCATION)
    return allocation, dense if twice else None


def with_curves(prepared: Prepared, job: Job, blocks: Sequence[Block], allocation: Allocation) -> Allocation:
    """Return the allocation with the error of every block alone, at several widths."""
    search = search_of(prepared, job, blocks, narrow=_narrow(job.recipe))
    return dataclasses.replace(allocation, curves=curves_of(alone(search)))


def _reads_original(recipe: Recipe) -> bool:
    """Return True if widths follow from statistics of the original model."""
    return not simple(recipe) and (recipe.max_loss is not None or recipe.allocate in ("flap", "global"))


def _serves_twice(recipe: Recipe, files: StatsFiles, blocks: Sequence[Block]) -> bool:
    """Return True if statistics of the original model serve to decide the blocks, and not only their widths."""
    small = sum(map(size_of, blocks)) <= TOGETHER
    original = recipe.compensate == BEST or not recipe.closed_loop
    return (_reads_original(recipe) and original and small and needs_data(recipe)) or files != NO_FILES


def _dense(prepared: Prepared, job: Job, blocks: Sequence[Block], files: StatsFiles, *, twice: bool) -> Dense | None:
    """Read or measure statistics of the original model; None if nothing needs them more than once."""
    shared = twice or (_reads_original(job.recipe) and job.group.size > 1)
    together = sys.maxsize if twice else TOGETHER
    return known(prepared, blocks, job, files, shared=shared, together=together)


def cheap(prepared: Prepared, blocks: Sequence[Block]) -> bool:
    """Return True if error curves take about a minute at most: each block is tried alone, in the whole model."""
    most, macs = CHEAP
    return len(blocks) <= most and len(blocks) * impact_macs(prepared) <= macs


def _narrow(recipe: Recipe) -> Narrow:
    """Return a function that decides a block at any width; the scores of its units are computed once."""
    scores = functools.lru_cache(maxsize=1)(
        lambda view: SELECTORS[recipe.selector](view, np.random.default_rng((recipe.seed, int(view.block.ids[0]))))
    )

    def narrow(view: View, kept: int) -> Change:
        return decided(view, kept, recipe, lambda one, _: scores(one))

    return narrow


def _trial(prepared: Prepared, job: Job, blocks: Sequence[Block], widths: Mapping[str, int]) -> float:
    """Compute the end-to-end error of the model at these widths, decided with the same recipe."""
    return harm(prepared, job.recipe, lambda part: _settled(part, job.recipe, blocks, widths))


def _settled(
    part: Prepared, recipe: Recipe, blocks: Sequence[Block], widths: Mapping[str, int], dense: Dense | None = None
) -> Ledger:
    """Decide and compensate a candidate, in this process alone."""
    run = Run(part, Job(recipe=recipe), widths, dense)
    settle(run, [b for b in blocks if widths[b.name] < b.units])
    bring_back(run)
    return run.ledger


def task_of(search: Search, cost: Cost) -> Task:
    """Return the search for widths within `max_loss` at the least cost.

    Args:
        search: the blocks; statistics of parts of its data are measured once if they serve to decide the blocks.
        cost: of the model at given widths.
    """
    prepared, recipe, blocks = search.prepared, search.recipe, search.blocks
    assert recipe.max_loss is not None
    parts = _serves_twice(recipe, NO_FILES, blocks) and PARTS * sum(map(size_of, blocks)) <= TOGETHER

    @functools.cache
    def dense(part: Prepared) -> Dense | None:
        alone = Job(recipe=recipe)
        return (
            search.dense if part is prepared else _dense(part, alone, blocks, NO_FILES, twice=True) if parts else None
        )

    def settled(part: Prepared, widths: Mapping[str, int]) -> Ledger:
        return _settled(part, recipe, blocks, widths, dense(part))

    def unfitted(part: Prepared, widths: Mapping[str, int]) -> Ledger:
        plain = dataclasses.replace(recipe, compensate="grail", closed_loop=False, norms="none")
        return _settled(part, plain, blocks, widths, dense(part))

    return Task(
        search=search,
        settle=settled,
        cost=cost,
        minimize=recipe.minimize,
        limit=recipe.max_loss,
        decide=unfitted if recipe.compensate == BEST else None,
    )


def frontier_task(prepared: Prepared, job: Job, blocks: Sequence[Block], cost: Cost) -> Task:
    """Measure the statistics of the original model, and return the search for points of its frontier."""
    with job.clock.stage("measure"):
        dense = _dense(prepared, job, blocks, NO_FILES, twice=_serves_twice(job.recipe, NO_FILES, blocks))
    return task_of(search_of(prepared, job, blocks, narrow=_narrow(job.recipe), dense=dense), cost)


def _searched(search: Search) -> Allocation:
    """Return the widths that cost least within `max_loss`."""
    prepared, recipe, blocks = search.prepared, search.recipe, search.blocks
    cost, note = measure_of(prepared, recipe.minimize), ""
    if recipe.minimize == "latency":
        cost, note = latency_of(prepared, blocks, search.job.alone())
    widths, found = within(task_of(search, cost))
    done = at_widths(prepared, blocks, recipe, widths, widths)
    return dataclasses.replace(done, used="search", found=found, note=note)
