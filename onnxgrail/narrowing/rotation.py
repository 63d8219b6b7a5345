"""Rotate the residual streams and tables of a prepared model, so that their last channels carry the least."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from onnxgrail.algebra.rotation import (
    Moments,
    basis_of,
    basis_of_layers,
    basis_of_queries,
    basis_of_values,
    of_unit_size,
    order_of_pairs,
    unnormed,
    with_biases,
)
from onnxgrail.allocation.losses import measures
from onnxgrail.calibration.branching import look
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.proof import unchanged
from onnxgrail.calibration.repaired import NEEDS, lacking, needs_option, repairs, surveyed
from onnxgrail.calibration.streaming import in_order, in_original
from onnxgrail.core import INNER, Floats, Kind, Probe, Recipe, Refusal, Stats
from onnxgrail.graph.flatten.branches import folded
from onnxgrail.graph.io.mapped import keep
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.rewrite.caches import shown
from onnxgrail.graph.rotate.basis import Rotatable, rotatable, rotate
from onnxgrail.graph.rotate.inside import REASONS
from onnxgrail.graph.rotate.streams import Stream
from onnxgrail.graph.trace.survey import Survey
from onnxgrail.graph.trace.tracer import trace
from onnxgrail.machine.job import Job
from onnxgrail.machine.steps.codec import Record
from onnxgrail.search.kernels import unmeasurable

STEP = "rotation"  # cache key of the bases
PART = 2**27  # bytes of second moments that are measured together; while they are added up they take a few times that
AGAIN = 2  # models with some of the bases that are kept in memory, for the next question
COUNTED = ("heads", "mlp")  # kinds of heads, and of the values of a single one
DIFFERS = "in another basis, the model gives other numbers"
ENDLESS = "no basis follows from its weights: numbers in them or in their squares are NaN or infinite"
WHOLE = "it keeps all channels: what other blocks lose costs less"


def _kinds(prepared: Prepared, recipe: Recipe) -> list[Kind]:
    """Return what is rotated.

    Tables cost multiply-accumulates, so parameters or bytes have to be asked for. Two convolutions cost less than one
    only without many of the channels between them: losses have to tell, and kernels where latency is asked for. Those
    of 8-bit convolutions are not measured, and two take longer.
    """
    searched = None if recipe.max_loss is None else recipe.minimize
    amounts = recipe.ratio, recipe.target_params, recipe.target_size
    sized = searched in ("params", "size") or any(amount is not None for amount in amounts)
    asked = sized or searched == "macs" or recipe.target_macs is not None
    timed = searched == "latency" and recipe.quantize != "int8" and not unmeasurable(prepared, recipe)
    given = recipe.widths is not None
    fits = {"embedding": sized or given, "rank": given or ((asked or timed) and measures(prepared, recipe))}
    return [kind for kind in _turned(recipe) if fits.get(kind, True)]


def _turned(recipe: Recipe) -> list[Kind]:
    """Return the kinds with a basis of their own, and `heads` if whole heads go where channels inside cannot.

    Channels inside heads lose less; those of queries, keys and values together make a layer as small as whole heads do.
    """
    both = {"heads", *INNER}
    inner = INNER if "heads" not in recipe.blocks else both if both <= {*recipe.blocks} else ()
    return [kind for kind in recipe.blocks if kind in ("stream", "embedding", "rank", *inner)]


def rotated(prepared: Prepared, job: Job) -> Prepared:
    """Return a model with the same function, its residual streams and tables in the basis of their second moments.

    Models without data, and those whose streams depend on their basis, are returned as they are.

    Args:
        prepared: the model and its data.
        job: the run; the bases are cached in its folder.
    """
    found = turnable(prepared, job.recipe)
    if found is None:
        return _untold(prepared, job.recipe)
    if not found.names:
        return _in_bases(prepared, found, {}, job.recipe)
    with job.clock.stage("rotate"):
        known = job.steps.known(STEP)
        if known is None:
            measured = _measured(prepared, found, job)
            known = job.steps.make(STEP, lambda: Record(arrays=_bases(prepared, found, measured)))
        return _proved(prepared, found, known.arrays, job)


def turnable(prepared: Prepared, recipe: Recipe) -> Rotatable | None:
    """Find what a recipe turns; None if it turns nothing, or there are no data."""
    kinds = _kinds(prepared, recipe)
    if prepared.batches.synthetic or not repairs(recipe) or not kinds:
        return None
    return _rotatable(prepared, recipe, kinds, measures=measures(prepared, recipe))


def _untold(prepared: Prepared, recipe: Recipe) -> Prepared:
    """Return a model that keeps its bases because of its data or an option, with this as the reason for its streams."""
    needs = lacking(recipe, synthetic=prepared.batches.synthetic)
    if not needs or not (kinds := _kinds(prepared, recipe)):
        return prepared
    found = _rotatable(prepared, recipe, kinds, measures=measures(prepared, recipe))
    return _left_alone(prepared, found, [*_normed(found), *found.heads], NEEDS.format(needs))


def _normed(found: Rotatable) -> list[str]:
    """Return the names of streams that are no blocks in another basis, unlike linear ones."""
    return [name for name, stream in found.streams.items() if not stream.linear]


def with_unasked(prepared: Prepared, recipe: Recipe) -> Prepared:
    """Return a model with the reason for its streams if `--blocks` leaves them out."""
    if "stream" in recipe.blocks or prepared.batches.synthetic or not repairs(recipe):
        return prepared
    found = _found(prepared, recipe, ["stream"], None)
    return _left_alone(prepared, found, _normed(found), NEEDS.format("--blocks stream"))


def _left_alone(prepared: Prepared, found: Rotatable, names: Collection[str], reason: str) -> Prepared:
    """Return a model in which bases of these names stay, with that reason instead of those found without them."""
    slots = [slot for name in names if name in found.streams for slot in found.streams[name].slots]
    writing = {slot.value.name for slot in slots if not slot.reads} | {*names}
    products = {node.name for name in names if name in found.heads for node in found.heads[name].products}
    others = [r for r in prepared.survey.refusals if r.value not in writing and r.node not in products]
    here = [Refusal(value=name, node="", op="", reason=reason) for name in names]
    return replace(prepared, survey=replace(prepared.survey, refusals=tuple(dict.fromkeys([*others, *here]))))


def _proved(prepared: Prepared, found: Rotatable, bases: Mapping[str, Floats], job: Job) -> Prepared:
    """Return the model in those bases in which it gives the same numbers; the others are refused by name.

    Args:
        prepared: the model and its data.
        found: what can be turned.
        bases: by name; none for those without one.
        job: the run.
    """
    recipe, facts = job.recipe, prepared.survey.facts

    @functools.cache
    def turned(names: tuple[str, ...]) -> Prepared:
        every = len(names) == len(found.names)
        some = found if every else rotatable(prepared.model, facts, _turned(recipe), names, interface=recipe.kv_io)
        return _in_bases(prepared, some, bases, recipe)

    able = [name for name in found.names if name in bases]
    good = unchanged(prepared, able, lambda names: turned(names).model, recipe.providers)
    done, wrong = turned(good), [name for name in found.names if name not in good]
    reasons = {name: DIFFERS if name in bases else ENDLESS for name in wrong}
    refusals = [Refusal(value=name, node="", op="", reason=reasons[name]) for name in wrong]
    done = replace(done, survey=_refused(done.survey, refusals))
    return replace(done, again=functools.lru_cache(AGAIN)(functools.partial(_again, done, recipe)))


def _rotatable(prepared: Prepared, recipe: Recipe, kinds: Sequence[Kind], *, measures: bool) -> Rotatable:
    """Find what can be turned, for widths that follow from measured losses or not.

    Where bits are chosen beside widths, linear streams keep their basis: most of them stay whole, and then the bits of
    their weights would be chosen for numbers that the file does not hold. Heads stay whole if a recipe names them, or
    if their pairs would have to go in equal shares: these have no basis, and lose more than heads do.
    """
    turn = functools.partial(rotatable, prepared.model, prepared.survey.facts, kinds, interface=recipe.kv_io)
    found = turn()
    shares = "heads" in kinds and recipe.widths is None and not measures
    counted = [b for b in prepared.survey.blocks if b.kind in COUNTED and b.name in (recipe.widths or {})]
    weights_of_heads = {slot.initializer for block in counted for slot in block.slots}

    def turns(name: str) -> bool:
        if name in found.streams:
            return not (recipe.counts_bits and found.streams[name].linear)
        inside = found.heads[name]
        pairs = inside.units is not None and shares
        return not pairs and weights_of_heads.isdisjoint(part.value.name for part in inside.parts)

    wanted = [name for name in found.names if turns(name)]
    return found if len(wanted) == len(found.names) else turn(wanted)


def _again(prepared: Prepared, recipe: Recipe, names: frozenset[str]) -> Prepared:
    """Return the model with only some of its bases changed."""
    return _in_bases(prepared.baseline, _found(prepared, recipe, _turned(recipe), names), prepared.bases, recipe)


def _found(prepared: Prepared, recipe: Recipe, kinds: Collection[Kind], names: Collection[str] | None) -> Rotatable:
    before = prepared.baseline
    return rotatable(before.model, before.survey.facts, kinds, names, interface=recipe.kv_io)


def as_with_data(prepared: Prepared, recipe: Recipe) -> Prepared:
    """Return the model with the means and normalizations that only stay for want of data as they are with data."""
    if not any(map(needs_option, prepared.survey.refusals)):
        return prepared
    model, survey = surveyed(prepared.model, prepared.survey.facts, recipe, synthetic=False)
    return replace(prepared, model=model, survey=survey, whole=prepared.original)


def unmeasured(prepared: Prepared, recipe: Recipe) -> Prepared:
    """Return the model with everything that a recipe would turn marked as turned, to count what it holds."""
    found = _rotatable(prepared, recipe, _turned(recipe), measures=True)
    bases = {name: np.eye(one.width) for name, one in found.streams.items()}
    bases |= {name: one.same for name, one in found.heads.items()}
    return _in_bases(prepared, found, bases, recipe)


def kept_whole(prepared: Prepared) -> list[Refusal]:
    """Return why some heads keep all channels inside."""
    return [refusal for refusal in prepared.survey.refusals if refusal.reason in REASONS]


def with_needed(prepared: Prepared, names: Collection[str], recipe: Recipe) -> Prepared:
    """Return the model as it is if only the blocks of these names lose units; it still tells which bases failed."""
    left = prepared.left(names)
    if left is prepared:
        return prepared
    failed = [refusal for refusal in prepared.survey.refusals if refusal.reason in (DIFFERS, ENDLESS)]
    found = _found(prepared, recipe, _turned(recipe), prepared.bases.keys() - left.bases.keys())
    left = _left_alone(left, found, _normed(found), WHOLE)  # heads and convolutions are blocks in this basis, too
    return replace(left, survey=_refused(left.survey, failed))


def _in_bases(prepared: Prepared, found: Rotatable, bases: Mapping[str, Floats], recipe: Recipe) -> Prepared:
    """Return the model in other bases, run once and traced."""
    if not found.names:
        return replace(prepared, survey=_refused(prepared.survey, found.refusals))
    seen = look(folded(keep(rotate(found, bases))), prepared.batches, recipe.providers)
    traced = trace(seen.model, seen.facts, interface=recipe.kv_io)
    survey = _refused(replace(traced, refusals=shown(seen.model, traced).refusals), found.refusals)
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


@dataclass(frozen=True, slots=True, eq=False)
class _Measured:
    """Sums by name, and those of the normalizations of a stream added up; empty in all processes but the first."""

    sums: Mapping[str, list[Stats]]
    streams: Mapping[str, Moments]


def _measured(prepared: Prepared, found: Rotatable, job: Job) -> _Measured:
    """Return the statistics that every basis needs."""
    wanted = probes_of(prepared, found)
    normed = {name: stream for name, stream in found.streams.items() if stream.norms}
    sums: dict[str, dict[int, Stats]] = {name: {} for name in wanted}
    streams = {name: Moments(beside_mean=stream.carries_mean) for name, stream in normed.items()}
    places = [(name, place) for name, some in wanted.items() for place in range(len(some))]
    probes = [(wanted[name][place],) for name, place in places]
    order = in_order(prepared, probes)
    for number, given in in_original(prepared, job, [probes[n] for n in order], "rotating", together=PART):
        if not given:
            continue
        (name, place), (own,) = places[order[number]], given
        if name in normed:
            norm = normed[name].norms[place]
            streams[name].add(unnormed(own, norm.gain, norm.shift))
        else:
            sums[name][place] = own
    return _Measured({name: [some[place] for place in sorted(some)] for name, some in sums.items()}, streams)


def probes_of(prepared: Prepared, found: Rotatable) -> dict[str, Sequence[Probe]]:
    """Return by name what is measured for each basis."""
    shapes = prepared.survey.facts.shapes
    wanted: dict[str, Sequence[Probe]] = {name: _probes(stream, shapes) for name, stream in found.streams.items()}
    return wanted | {name: inside.probes for name, inside in found.heads.items()}


def _probes(stream: Stream, shapes: Mapping[str, tuple[int, ...]]) -> list[Probe]:
    """Return probes of what gives a stream its basis: its normalized tensors, or those named in it."""
    index = np.arange(stream.width)[:, None]
    measured = [(value.name or "", axis) for value, axis in stream.measured]
    places = [(name, len(shapes[name]) - 1) for name in stream.normalized] or measured
    return [Probe(value=name, axis=axis, index=index, pooled=False) for name, axis in places]


def _bases(prepared: Prepared, found: Rotatable, measured: _Measured) -> dict[str, Floats]:
    """Return the bases by name, none where weights with NaN or infinity give no finite one."""
    bases = {}
    for name in found.names:
        make = _of_stream if name in found.streams else _of_heads
        with np.errstate(invalid="ignore", over="ignore"), contextlib.suppress(np.linalg.LinAlgError):
            basis = make(prepared, found, name, measured)
            if np.isfinite(basis).all():
                bases[name] = basis
    return bases


def _of_stream(prepared: Prepared, found: Rotatable, name: str, measured: _Measured) -> Floats:
    """Return the basis of a stream or a table."""
    if name in measured.streams:
        return measured.streams[name].basis()
    grams = [sums.gram for sums in measured.sums[name]]
    if found.streams[name].linear:
        return basis_of_layers(grams, found.readings(name))
    rows = weights.original(name, prepared.model, prepared.survey).astype(np.float64)
    return basis_of([*grams, rows.T @ rows])  # rows that the data never look up count too


def _of_heads(_: Prepared, found: Rotatable, name: str, measured: _Measured) -> Floats:
    """Return the bases inside heads, or the order of the pairs of their channels."""
    inside, left = found.heads[name], iter(measured.sums[name])
    sums = [[list(islice(left, len(heads))) for heads in part.index] for part in inside.measured]
    if inside.kind != "qk":
        groups = basis_of_values(sums, found.products(name))
        return np.asarray(groups[0]) if inside.kind == "rank" else groups
    if inside.units is None:
        pairs = zip(sums, found.added(name), strict=True)
        return basis_of_queries(*inside.sides([with_biases(some, biases) for some, biases in pairs]))
    sides = inside.sides(sums)
    queries, keys = (of_unit_size(side) if normed else side for side, normed in zip(sides, inside.normed, strict=True))
    return order_of_pairs(queries, keys, list(left), inside.units, normed=any(inside.norms))
