"""Rotate the residual streams and tables of a prepared model, so that their last channels carry the least."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from onnxgrail.algebra.fit.compensate import BEST
from onnxgrail.algebra.rotation import basis_of, unnormed
from onnxgrail.allocation.statistics import NO_FILES, StatsFiles
from onnxgrail.calibration.branching import look
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.streaming import stream_of
from onnxgrail.core import Floats, Kind, Probe, Recipe, Refusal, Stats
from onnxgrail.graph.io.mapped import keep
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.rotate.basis import Rotatable, rotatable, rotate
from onnxgrail.graph.rotate.streams import Stream
from onnxgrail.graph.trace.survey import Survey
from onnxgrail.graph.trace.tracer import trace
from onnxgrail.machine.job import Job
from onnxgrail.machine.progress import ticking
from onnxgrail.machine.steps.codec import Record
from onnxgrail.machine.steps.steps import Steps
from onnxgrail.narrowing.decide import Decision, decide

STEP = "rotation"  # cache key of the bases


def decided(
    prepared: Prepared, job: Job, files: StatsFiles = NO_FILES, sensitivity: bool | None = False
) -> tuple[Prepared, Decision]:
    """Rotate streams and tables, and decide what becomes of the model; those that keep all channels are not rotated.

    Args and errors are those of `decide`.

    Returns:
        The model that the decision is about, and the decision.
    """
    prepared = rotated(prepared, job)
    decision = decide(prepared, job, files, sensitivity=sensitivity)
    widths = {change.block.name: change.reducer.kept.size for change in decision.changes}
    used = {change.block.ranked for change in decision.changes} - {""}
    if used == set(prepared.bases):
        return prepared, decision
    left = rotated_again(prepared, used, job.recipe)
    if not widths.keys() <= {block.name for block in left.survey.blocks}:
        return prepared, decision
    recipe = replace(job.recipe, widths=widths)
    again = decide(left, replace(job, recipe=recipe, steps=Steps(group=job.group)))
    return left, replace(again, chosen=decision.chosen, allocation=decision.allocation)


def rotates(recipe: Recipe) -> bool:
    """Return True if a recipe narrows streams in a basis of their own, so that fits repair what reads them."""
    usual = recipe.compensate == BEST and recipe.reducer == "prune" and recipe.method == ("grail",)
    return usual and not recipe.keeps_everything


def _kinds(recipe: Recipe) -> list[Kind]:
    """Return what is rotated: tables cost multiply-accumulates, so parameters or bytes have to be asked for."""
    searched = recipe.max_loss is not None and recipe.minimize in ("params", "size")
    sizes = (recipe.ratio, recipe.target_params, recipe.target_size, recipe.widths)
    sized = searched or any(size is not None for size in sizes)
    return [kind for kind in recipe.blocks if kind == "stream" or (kind == "embedding" and sized)]


def rotated(prepared: Prepared, job: Job) -> Prepared:
    """Return a model with the same function, its residual streams and tables in the basis of their second moments.

    Models without data, and those whose streams depend on their basis, are returned as they are.

    Args:
        prepared: the model and its data.
        job: the run; the bases are cached in its folder.
    """
    recipe = job.recipe
    kinds = _kinds(recipe)
    if prepared.batches.synthetic or not rotates(recipe) or not kinds:
        return prepared
    found = rotatable(prepared.model, prepared.survey.facts, kinds)
    if not found.streams:
        return _in_bases(prepared, found, {}, recipe)
    with job.clock.stage("rotate"):
        known = job.steps.known(STEP)
        if known is None:
            measured = _measured(prepared, found.streams, job)
            known = job.steps.make(STEP, lambda: Record(arrays=_bases(prepared, found.streams, measured)))
        return _in_bases(prepared, found, known.arrays, recipe)


def rotated_again(prepared: Prepared, names: Collection[str], recipe: Recipe) -> Prepared:
    """Return the model with only some of its streams and tables in other bases."""
    before = prepared.baseline
    if not names:
        return before
    found = rotatable(before.model, before.survey.facts, only=names)
    return _in_bases(before, found, prepared.bases, recipe)


def unmeasured(prepared: Prepared, recipe: Recipe) -> Prepared:
    """Return the model with streams and tables that can lose channels, in their own basis, to count what they hold."""
    found = rotatable(prepared.model, prepared.survey.facts)
    return _in_bases(prepared, found, {name: np.eye(one.width) for name, one in found.streams.items()}, recipe)


def _in_bases(prepared: Prepared, found: Rotatable, bases: Mapping[str, Floats], recipe: Recipe) -> Prepared:
    """Return the model in other bases, run once and traced."""
    if not found.streams:
        return replace(prepared, survey=_refused(prepared.survey, found.refusals))
    seen = look(keep(rotate(found, bases)), prepared.batches, recipe.providers)
    survey = _refused(trace(seen.model, seen.facts, interface=recipe.kv_io), found.refusals)
    return replace(
        prepared,
        model=seen.model,
        survey=survey,
        feed=seen.feed,
        routes=seen.routes,
        unrotated=prepared,
        bases={name: bases[name] for name in found.streams},
    )


def _refused(survey: Survey, refusals: Sequence[Refusal]) -> Survey:
    return replace(survey, refusals=tuple(dict.fromkeys([*survey.refusals, *refusals])))


def _measured(prepared: Prepared, streams: Mapping[str, Stream], job: Job) -> list[Stats]:
    """Return the statistics of all normalized tensors; empty in all processes but the first."""
    shapes = prepared.survey.facts.shapes
    probes = []
    for stream in streams.values():
        index = np.arange(stream.width)[:, None]
        names = [norm.result.name or "" for norm in stream.norms] or [_looked_up(stream)]
        probes += [Probe(value=n, axis=len(shapes[n]) - 1, index=index, pooled=False) for n in names]
    with stream_of(prepared, job.recipe, job.group) as walk:
        tick = ticking(job.progress, "rotating", len(walk.masks))
        return list(walk.measure(probes, weights.empty(prepared.survey), tick))


def _bases(prepared: Prepared, streams: Mapping[str, Stream], measured: Sequence[Stats]) -> dict[str, Floats]:
    left = iter(measured)
    found = {}
    for name, stream in streams.items():
        grams = [unnormed(next(left), norm.gain, norm.shift) for norm in stream.norms]
        if not grams:  # rows that the data never look up count too
            rows = weights.original(name, prepared.model, prepared.survey).astype(np.float64)
            grams = [next(left).gram, rows.T @ rows]
        found[name] = basis_of(grams)
    return found


def _looked_up(stream: Stream) -> str:
    """Return the name of the vectors that are looked up in a table."""
    return next(slot.node.outputs[0].name or "" for slot in stream.slots if not slot.reads)
