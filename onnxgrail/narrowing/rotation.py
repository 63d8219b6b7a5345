"""Rotate the residual streams and tables of a prepared model, so that their last channels carry the least."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from onnxgrail.algebra.fit.compensate import BEST
from onnxgrail.algebra.rotation import basis_of, basis_of_queries, basis_of_values, order_of_pairs, unnormed
from onnxgrail.allocation.statistics import NO_FILES, StatsFiles
from onnxgrail.calibration.agreement import same_function
from onnxgrail.calibration.branching import look
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.streaming import stream_of
from onnxgrail.core import INNER, Floats, Kind, Probe, Recipe, Refusal, Stats
from onnxgrail.graph.io.mapped import keep
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.rotate.basis import Rotatable, rotatable, rotate
from onnxgrail.graph.rotate.inside import REASONS
from onnxgrail.graph.rotate.streams import Stream
from onnxgrail.graph.trace.survey import Survey
from onnxgrail.graph.trace.tracer import trace
from onnxgrail.machine.job import Job
from onnxgrail.machine.progress import ticking
from onnxgrail.machine.steps.codec import Record
from onnxgrail.machine.steps.steps import Steps
from onnxgrail.narrowing.decide import Decision, decide

STEP = "rotation"  # cache key of the bases
DIFFERS = "in another basis inside heads, the model gives other numbers"


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
    inside = {name for name, basis in prepared.bases.items() if basis.ndim != 2}
    used |= inside if used & inside else set()  # a head that stays for one of them stays for all
    if used == set(prepared.bases):
        return prepared, decision
    left = rotated_again(prepared, used, job.recipe)
    if not widths.keys() <= {block.name for block in left.survey.blocks}:
        return prepared, decision
    recipe = replace(job.recipe, widths=widths)
    again = decide(left, replace(job, recipe=recipe, steps=Steps(group=job.group)))
    return left, replace(again, chosen=decision.chosen, allocation=decision.allocation, share=decision.share)


def rotates(recipe: Recipe) -> bool:
    """Return True if a recipe narrows streams in a basis of their own, so that fits repair what reads them."""
    usual = recipe.compensate == BEST and recipe.reducer == "prune" and recipe.method == ("grail",)
    return usual and not recipe.keeps_everything and not recipe.only_bits


def _kinds(recipe: Recipe) -> list[Kind]:
    """Return what is rotated: tables cost multiply-accumulates, so parameters or bytes have to be asked for."""
    searched = recipe.max_loss is not None and recipe.minimize in ("params", "size")
    sizes = (recipe.ratio, recipe.target_params, recipe.target_size, recipe.widths)
    sized = searched or any(size is not None for size in sizes)
    return [kind for kind in _turned(recipe) if kind != "embedding" or sized]


def _turned(recipe: Recipe) -> list[Kind]:
    """Return the kinds with a basis of their own; where whole heads may go, none is inside heads."""
    inner = () if "heads" in recipe.blocks else INNER
    return [kind for kind in recipe.blocks if kind in ("stream", "embedding", *inner)]


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
    if not found.names:
        return _in_bases(prepared, found, {}, recipe)
    with job.clock.stage("rotate"):
        known = job.steps.known(STEP)
        if known is None:
            measured = _measured(prepared, found, job)
            known = job.steps.make(STEP, lambda: Record(arrays=_bases(prepared, found, measured)))
        done = _in_bases(prepared, found, known.arrays, recipe)
        if not found.heads or same_function(prepared.model, done.model, done.feed, recipe.providers):
            return done
        whole = rotatable(prepared.model, prepared.survey.facts, kinds, list(found.streams))
        why = Refusal(value=next(iter(found.heads)), node="", op="MatMul", reason=DIFFERS)
        return _in_bases(prepared, replace(whole, refusals=(*whole.refusals, why)), known.arrays, recipe)


def rotated_again(prepared: Prepared, names: Collection[str], recipe: Recipe) -> Prepared:
    """Return the model with only some of its bases changed."""
    before = prepared.baseline
    if not names:
        return before
    found = rotatable(before.model, before.survey.facts, _turned(recipe), names)
    return _in_bases(before, found, prepared.bases, recipe)


def unmeasured(prepared: Prepared, recipe: Recipe) -> Prepared:
    """Return the model with everything that a recipe would turn marked as turned, to count what it holds."""
    found = rotatable(prepared.model, prepared.survey.facts, _turned(recipe))
    bases = {name: np.eye(one.width) for name, one in found.streams.items()}
    bases |= {name: one.same for name, one in found.heads.items()}
    return _in_bases(prepared, found, bases, recipe)


def kept_whole(prepared: Prepared) -> list[Refusal]:
    """Return why some heads keep all channels inside."""
    return [refusal for refusal in prepared.survey.refusals if refusal.reason in REASONS]


def _in_bases(prepared: Prepared, found: Rotatable, bases: Mapping[str, Floats], recipe: Recipe) -> Prepared:
    """Return the model in other bases, run once and traced."""
    if not found.names:
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
        bases={name: bases[name] for name in found.names},
    )


def _refused(survey: Survey, refusals: Sequence[Refusal]) -> Survey:
    return replace(survey, refusals=tuple(dict.fromkeys([*survey.refusals, *refusals])))


def _measured(prepared: Prepared, found: Rotatable, job: Job) -> dict[str, list[Stats]]:
    """Return the statistics that every basis needs, by name; empty in all processes but the first."""
    shapes = prepared.survey.facts.shapes
    wanted = {name: _probes(stream, shapes) for name, stream in found.streams.items()}
    wanted |= {name: inside.probes for name, inside in found.heads.items()}
    probes = [probe for some in wanted.values() for probe in some]
    with stream_of(prepared, job.recipe, job.group) as walk:
        tick = ticking(job.progress, "rotating", len(walk.masks))
        left = iter(list(walk.measure(probes, weights.empty(prepared.survey), tick)))
    return {name: list(islice(left, len(some))) for name, some in wanted.items()}


def _probes(stream: Stream, shapes: Mapping[str, tuple[int, ...]]) -> list[Probe]:
    """Return probes of all normalized tensors of a stream, or of what is looked up in a table and meets a tied head."""
    index = np.arange(stream.width)[:, None]
    names = stream.normalized or stream.measured
    return [Probe(value=n, axis=len(shapes[n]) - 1, index=index, pooled=False) for n in names]


def _bases(prepared: Prepared, found: Rotatable, measured: Mapping[str, Sequence[Stats]]) -> dict[str, Floats]:
    bases = {}
    for name, stream in found.streams.items():
        grams = [
            unnormed(sums, norm.gain, norm.shift) for sums, norm in zip(measured[name], stream.norms, strict=False)
        ]
        if not grams:  # rows that the data never look up count too
            rows = weights.original(name, prepared.model, prepared.survey).astype(np.float64)
            grams = [*(sums.gram for sums in measured[name]), rows.T @ rows]
        bases[name] = basis_of(grams)
    for name, inside in found.heads.items():
        left = iter(measured[name])
        sums = [[list(islice(left, len(heads))) for heads in part.index] for part in inside.measured]
        if inside.kind == "vo":
            bases[name] = basis_of_values(sums, found.products(name))
        elif inside.units is not None:
            bases[name] = order_of_pairs(sums[0], sums[1], list(left), inside.units)
        else:
            bases[name] = basis_of_queries(*sums)
    return bases
