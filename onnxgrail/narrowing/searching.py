"""Searches for widths: what a block becomes at any width, and what candidates become."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from onnxgrail.algebra.decide import decided, error_at, needs_data, scores_of
from onnxgrail.algebra.fit.compensate import BEST
from onnxgrail.algebra.moments.curves import Narrow
from onnxgrail.allocation.ladders import Cost
from onnxgrail.allocation.losses import Search, simple, tells
from onnxgrail.allocation.statistics import NO_FILES, StatsFiles, known
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.stream.beginnings import Beginnings
from onnxgrail.calibration.stream.dense import TOGETHER, Dense, size_of
from onnxgrail.core import Block, Floats, Recipe, View
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.amounts import cache_bytes
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.bits.rounding import in_few_bits
from onnxgrail.narrowing.choosing import Run
from onnxgrail.narrowing.grail import bring_back, settle
from onnxgrail.narrowing.two_networks import Targets, goals_of
from onnxgrail.search.candidates import Task
from onnxgrail.search.harms import Near

BEGUN = 16  # part of the cache that holds cuts where candidates begin
PARTS = 4  # the data, their two halves and a part of one, of which a search keeps statistics and targets of fits


def _reads_original(prepared: Prepared, recipe: Recipe) -> bool:
    """Return True if widths follow from statistics of the original model."""
    measured = recipe.allocate in ("flap", "global") or (recipe.allocate == "auto" and tells(prepared, recipe))
    return not simple(recipe) and (recipe.max_loss is not None or measured)


def serves_twice(prepared: Prepared, recipe: Recipe, files: StatsFiles, blocks: Sequence[Block]) -> bool:
    """Return True if statistics of the original model serve to decide the blocks, and not only their widths."""
    small = sum(map(size_of, blocks)) <= TOGETHER
    original = recipe.compensate == BEST or not recipe.closed_loop
    return (_reads_original(prepared, recipe) and original and small and needs_data(recipe)) or files != NO_FILES


def dense_of(prepared: Prepared, job: Job, blocks: Sequence[Block], files: StatsFiles, *, twice: bool) -> Dense | None:
    """Read or measure statistics of the original model; None if nothing needs them more than once."""
    shared = twice or (_reads_original(prepared, job.recipe) and job.group.size > 1)
    together = sys.maxsize if twice else TOGETHER
    return known(prepared, blocks, job, files, shared=shared, together=together)


def narrow_of(recipe: Recipe) -> Narrow:
    """Return what decides a block at any width; the scores of its units are computed once."""
    scores = functools.lru_cache(maxsize=1)(functools.partial(scores_of, recipe))

    def selector(view: View, _: np.random.Generator) -> Floats:
        return scores(view)

    return Narrow(
        change=functools.partial(decided, recipe=recipe, selector=selector),
        error=functools.partial(error_at, recipe=recipe, selector=selector),
    )


def _settled(run: Run, beginnings: Beginnings | None = None) -> Ledger:
    """Decide and compensate a candidate, in this process alone; fits begin at a cut before its first block."""
    some = run.prepared.survey.narrowed(run.kept)
    first = min((block.span[0] for block in some), default=0)
    settle(run, some, None if beginnings is None else beginnings.before(run.prepared.batches, first))
    bring_back(run)
    return run.ledger


def task_of(search: Search, cost: Cost, near: Near, spared: Mapping[str, str] | None = None) -> Task:
    """Return the search for widths that lose little for their cost.

    Args:
        search: the blocks; statistics of parts of its data are measured once if they serve to decide the blocks.
        cost: of the model at given widths.
        near: where losses matter.
        spared: weights that have more bits in all candidates, see `Found`.
    """
    prepared, recipe, blocks = search.prepared, search.recipe, search.blocks
    parts = serves_twice(prepared, recipe, NO_FILES, blocks) and PARTS * sum(map(size_of, blocks)) <= TOGETHER

    firsts = {prepared.batches.feeds: prepared}
    targets = Targets(recipe, cache_bytes(recipe) // PARTS, {prepared.model, prepared.baseline.model})

    def same(part: Prepared) -> Prepared:
        """Return the first model that was given with these data: trials and candidates share a half of them."""
        return firsts.setdefault(part.batches.feeds, part)

    @functools.cache
    def dense(part: Prepared) -> Dense | None:
        alone = Job(recipe=recipe)
        return (
            search.dense if part is prepared else dense_of(part, alone, blocks, NO_FILES, twice=True) if parts else None
        )

    goals = goals_of(prepared, recipe, blocks) if parts and recipe.compensate == BEST else ()
    beginnings = Beginnings(prepared, recipe.providers, cache_bytes(recipe) // BEGUN)

    def settled(part: Prepared, widths: Mapping[str, int]) -> Ledger:
        if part.model is not prepared.model:  # a form of its own, which shares nothing with other candidates
            return _settled(Run(part, Job(recipe=recipe), widths))
        return _settled(Run(part, Job(recipe=recipe), widths, dense(same(part)), targets.of(part, goals)), beginnings)

    def unfitted(part: Prepared, widths: Mapping[str, int]) -> Ledger:
        plain = dataclasses.replace(recipe, compensate="grail", closed_loop=False, norms="none")
        return _settled(Run(part, Job(recipe=plain), widths, dense(same(part))))

    few = search.rungs or recipe.quantize != "none"
    return Task(
        search=search,
        form=functools.lru_cache(maxsize=1)(prepared.left),
        settle=settled,
        cost=cost,
        minimize=recipe.minimize,
        near=near,
        beginnings=beginnings,
        decide=unfitted if recipe.compensate == BEST else None,
        rounded=in_few_bits(recipe, spared or {}, targets) if few else None,
    )


def limit_of(recipe: Recipe) -> Near:
    """Return the region around the largest loss of a recipe."""
    assert recipe.max_loss is not None
    return Near(limit=recipe.max_loss)
