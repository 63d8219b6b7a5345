"""Runs the refinements of `--refine` within their time limit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail import registry
from onnxgrail.algebra.fit.channelwise import twins
from onnxgrail.algebra.fit.compensate import BEST
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Change, Outcome, Recipe
from onnxgrail.graph.cuts.chunks import chunks
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.fittable.trainable import trainable
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.machine.progress import Progress
from onnxgrail.methods.refine.needed import require_torch
from onnxgrail.methods.refine.refinement import Refined, Refinement
from onnxgrail.search.candidates import loss_of

REFINEMENTS: Mapping[str, Callable[[Refinement, Progress], tuple[Refined, ...]]] = registry.REFINEMENTS


def refine(
    prepared: Prepared, job: Job, ledger: Ledger, changes: Sequence[Change], slim: ir.Model
) -> tuple[Refined, ...]:
    """Fit the weights of the narrowed model to the dense model, in place.

    All of it is taken back if the loss exceeds `max_loss` only with it.

    Args:
        prepared: the dense model with its data.
        job: the refinements in order, the seconds they share, and cached fits of an interrupted run.
        ledger: all decisions about the dense model.
        changes: the same, block by block.
        slim: the narrowed model, whose initializers are overwritten.

    Raises:
        MissingExtraError: torch is not installed.
    """
    recipe = job.recipe
    unfitted = slim.clone() if recipe.max_loss is not None else None  # weights are shared until they are fitted
    refinement = Refinement(
        prepared=prepared,
        recipe=recipe,
        slim=slim,
        ledger=ledger,
        steps=job.steps,
        # Weights fitted to the dense network have the channels of a cluster's representative, not their average.
        stand=twins(prepared.survey.ids, () if recipe.compensate == BEST else changes),
        deadline=_deadline(recipe),
        masks=prepared.masks(),
    )
    entries = _all(refinement, job.progress)
    return entries if unfitted is None else _within(prepared, recipe, (unfitted, slim), entries)


def refine_other(prepared: Prepared, job: Job, small: ir.Model, facts: Facts) -> tuple[Refined, ...]:
    """Fit the weights of a model narrowed by another tool, in place.

    Args:
        prepared: the dense model with its data.
        job: the refinements in order, the seconds they share, and cached fits of an interrupted run.
        small: the narrowed model, whose initializers are overwritten.
        facts: of the narrowed model.

    Raises:
        MissingExtraError: torch is not installed.
    """
    refinement = Refinement(
        prepared=prepared,
        recipe=job.recipe,
        slim=small,
        steps=job.steps,
        ledger=Ledger(dead=np.zeros(prepared.survey.ids, dtype=bool), arrays={}),
        stand=np.arange(prepared.survey.ids),
        deadline=_deadline(job.recipe),
        masks=prepared.masks(),
        facts=facts,
        alias=aliases(prepared.model, prepared.survey.facts, small, facts),
    )
    return _all(refinement, job.progress)


def _within(
    prepared: Prepared, recipe: Recipe, pair: tuple[ir.Model, ir.Model], entries: tuple[Refined, ...]
) -> tuple[Refined, ...]:
    """Give the fitted model the unfitted graph again if its loss exceeds the limit and the other one's loss."""
    unfitted, slim = pair
    after = loss_of(prepared, slim, recipe.providers).bound
    if after <= (recipe.max_loss or 0.0):
        return entries
    before = loss_of(prepared, unfitted, recipe.providers).bound
    if after <= before:
        return entries
    slim.graph = unfitted.graph
    why = Outcome(
        status="plain", reason=f"a loss of {after:.2%} with it, {before:.2%} without: all of it was taken back"
    )
    return tuple(dataclasses.replace(entry, after=entry.before, added={}, outcome=why) for entry in entries)


def _deadline(recipe: Recipe) -> float | None:
    return None if recipe.budget_seconds is None else time.perf_counter() + recipe.budget_seconds


def _all(job: Refinement, progress: Progress) -> tuple[Refined, ...]:
    require_torch(job.recipe)
    if not job.held:
        why = Outcome(status="skipped", reason="one batch of data leaves none to judge by: give more, or --batch-size")
        return tuple(
            Refined(block="model", kind=kind, before=None, after=None, epochs=0, seconds=0.0, outcome=why)
            for kind in job.recipe.refine
        )
    entries: list[Refined] = []
    for number, kind in enumerate(job.recipe.refine):
        entries += REFINEMENTS[kind](_share(job, len(job.recipe.refine) - number), progress)
    return tuple(entries)


def _share(job: Refinement, kinds: int) -> Refinement:
    """Return a job with an equal share of the remaining time; unused time is left for the following refinements."""
    left = job.left()
    return job if left is None else dataclasses.replace(job, deadline=time.perf_counter() + left / kinds)


def aliases(dense: ir.Model, facts: Facts, small: ir.Model, own: Facts) -> dict[str, str]:
    """Return dense names to names in the small model, for tensors that names alone do not match.

    Names are trusted if at least half of the block outputs are found by name with the shape of the dense model.
    Otherwise blocks are paired in order, if both models have equally many and all their outputs agree in shape. Else
    the result is empty, and blocks that cannot be matched are fitted together.
    """
    wanted, there = _ends(dense, facts), _ends(small, own)
    named = [n for n in wanted if n in own.shapes and own.shapes[n] == facts.shapes.get(n)]
    if not wanted or 2 * len(named) >= len(wanted) or len(wanted) != len(there):
        return {}
    pairs = dict(zip(wanted, there, strict=True))
    return pairs if all(facts.shapes.get(a) == own.shapes.get(b) for a, b in pairs.items()) else {}


def _ends(model: ir.Model, facts: Facts) -> list[str]:
    """Return the outputs of all blocks except the last."""
    alive = lives(model, facts, [1] * len(list(model.graph)))
    return [chunk.last for chunk in chunks(model, trainable(model), alive)][:-1]
