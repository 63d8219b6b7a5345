"""Comparison of a narrowed graph with the masked graph, up to rounding; at first by their outputs.

If the outputs differ and a discontinuous step lies upstream of them (`graph.steps`), both graphs are compared at the
inputs of every step, and both continue with the masked graph's outputs of the step.  Then a tie that rounding decides
causes no refusal, and a difference is reported with the step that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.runtime.session import Setup, open_session
from onnxgrail.calibration.stream.dense import grouped
from onnxgrail.calibration.stream.relay import in_pieces
from onnxgrail.core import Array, Block, Bools, Feed
from onnxgrail.errors import ModelError, RewriteError
from onnxgrail.graph.cuts.steps import Step, can_try, compared, handed, held, led, squashed, steps, tried_name
from onnxgrail.graph.fittable.hidden import leave_out
from onnxgrail.graph.io.mapped import discard
from onnxgrail.graph.io.serial import pack
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.rewrite.interface import changed, fit
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.survey import Ledger, Survey

LIMITS = {2: 2e-2, 4: 5e-5, 8: 1e-9}  # relative error allowed per itemsize of the model's floats
QUANTISED = 1e-3
LEAST = 1e-6  # size that the largest value of a tensor counts as at least
LOOSE = 4  # weights in another basis are rounded anew
AT_ONCE = 2**29  # bytes of tensors that are compared in a run


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trial:
    """The parameters shared by all comparisons of a model.

    Attributes:
        model, survey: the graph and its trace.
        feeds: inputs of the runs.
        providers: execution providers.
        names: tensors that are compared.
        squashed: those that a sigmoid makes.
        steps: discontinuous steps that an output depends on.
        limit: the largest relative difference that counts as rounding.
    """

    model: ir.Model
    survey: Survey
    feeds: tuple[Feed, ...]
    providers: tuple[str, ...]
    names: tuple[str, ...]
    squashed: frozenset[str]
    steps: tuple[Step, ...]
    limit: float


def trial_of(model: ir.Model, survey: Survey, feed: Feed, providers: Sequence[str]) -> Trial:
    """Return a trial on a feed, and on a feed of other sizes if possible, which reveals hard-coded sizes."""
    other, some = survey.facts.other, led(model, steps(model, survey.facts))
    bounded = squashed(model, survey.facts)
    return Trial(
        model=model,
        survey=survey,
        feeds=(feed, *survey.facts.more, *(() if other is None else (other,))),
        providers=tuple(providers),
        names=tuple(dict.fromkeys((*compared(model, some, survey.facts), *bounded.values()))),
        squashed=frozenset(bounded),
        steps=some,
        limit=_limit(model),
    )


def same_function(
    model: ir.Model, other: ir.Model, feed: Feed, providers: Sequence[str], facts: Facts | None = None
) -> bool:
    """Return True if two models of full width give the same numbers, up to rounding.

    Args:
        model: the reference.
        other: the model that should be the same function.
        feed: inputs of both.
        providers: execution providers.
        facts: of the reference; if outputs differ, both are compared at the inputs of every step, too, and go on with
            the reference's outputs of the step. None to compare outputs alone.
    """
    names, limit = [value.name or "" for value in model.graph.outputs], LOOSE * _limit(model)
    (want,), (got,) = (_run(providers, one.clone(), [feed], names) for one in (model, other))
    if _alike(got, want, names, limit):
        return True
    some = () if facts is None else led(model, steps(model, facts))
    if facts is None or not some:
        return False
    makes = [name for step in some for name in step.makes]
    reads = [name for step in some for name in step.reads if name not in feed]
    left = [name for name in dict.fromkeys([*reads, *names]) if name not in makes]
    (want,) = _run(providers, model.clone(), [feed], list(dict.fromkeys([*left, *makes])))
    parts = other.clone()
    held(parts, some, facts)
    (got,) = _run(providers, parts, [{**feed, **{name: want[name] for name in makes}}], left, whole=True)
    return _alike(got, want, left, limit)


def _alike(got: Feed, want: Feed, names: Sequence[str], limit: float) -> bool:
    """Return True if all named tensors of floats agree up to rounding."""
    floats = [name for name in names if isinstance(want[name], np.ndarray) and want[name].dtype.kind == "f"]
    return all(_distance(got[name], want[name]) <= limit for name in floats)


def doubt(trial: Trial, blocks: Sequence[Block], dead: Bools) -> str:
    """Return why the narrowed graph's outputs differ from the masked graph's; '' if they agree.

    Args:
        trial: the parameters of the comparison.
        blocks: the blocks to narrow; the masked graph's consumers of them have zero weights.
        dead: mask of the channels to remove, by channel id of the survey.
    """
    ports = changed(trial.model, trial.survey, dead)
    given = [fit(feed, ports) for feed in trial.feeds]
    try:
        got = _run(trial.providers, _slim(trial, dead), given, trial.names, whole=True)  # as it will be loaded
    except (ModelError, RewriteError) as error:
        return f"the narrowed graph does not run: {error}"
    wanted = _run(trial.providers, _masked(trial, blocks, dead), trial.feeds, trial.names)
    found = (_gap(trial, a, b, trial.names, dead) for a, b in zip(got, wanted, strict=True))
    return next((why for why in found if why), "")


def doubt_by_steps(trial: Trial, blocks: Sequence[Block], dead: Bools) -> str:
    """Return why the graphs differ at the inputs of a step; '' if they agree.

    After each step both graphs continue with the same values.  The narrowed graph's step must also give the masked
    graph's outputs for the masked graph's inputs.

    Args:
        trial: the parameters of the comparison.
        blocks: the blocks to narrow.
        dead: mask of the channels to remove, by channel id of the survey.
    """
    makes = tuple(name for step in trial.steps for name in step.makes)
    for feed in trial.feeds:
        given = fit(feed, changed(trial.model, trial.survey, dead))
        made: dict[str, Array] = {}
        for some, last in _portions(trial):
            reads = [name for step in some for name in step.reads]
            names = [n for n in dict.fromkeys((*reads, *last)) if n not in feed and n not in makes]
            tensors = list(dict.fromkeys((*names, *makes)))
            (wanted,) = _run(trial.providers, _masked(trial, blocks, dead), [feed], tensors)
            made = made or {name: _left(trial, name, wanted[name], dead) for name in makes}
            why = _differing(trial, _Portion(some, names, given, made, wanted), dead)
            if why:
                return why
    return ""


@dataclass(frozen=True, slots=True, eq=False)
class _Portion:
    """Steps that are compared in one run.

    Attributes:
        steps: the steps.
        names: tensors that are compared.
        given: the narrowed graph's feed.
        made: outputs of all steps, as the narrowed graph gets them.
        wanted: the masked graph's tensors.
    """

    steps: Sequence[Step]
    names: Sequence[str]
    given: Feed
    made: Feed
    wanted: Feed


def _differing(trial: Trial, portion: _Portion, dead: Bools) -> str:
    """Return what differs at the inputs and outputs of the given steps; '' if nothing does."""
    tried = [step for step in portion.steps if can_try(trial.model, step)]
    names, given, made, wanted = portion.names, portion.given, portion.made, portion.wanted
    there = {**given, **made, **{name: _left(trial, name, array, dead) for name, array in wanted.items()}}
    reads = {handed(name): there[name] for step in tried for name in step.reads}
    outputs = [tried_name(name) for step in tried for name in step.makes]
    try:
        slim = _slim(trial, dead)
        held(slim, trial.steps, trial.survey.facts, tried)
        (got,) = _run(trial.providers, slim, [{**given, **made, **reads}], [*names, *outputs], whole=True)
    except (ModelError, RewriteError, ValueError) as error:
        return f"the narrowed graph does not run in parts between its steps: {error}"
    why = _gap(trial, got, wanted, names, dead)
    for step in () if why else tried:
        if any(not _same(got[tried_name(name)], made[name], trial.limit) for name in step.makes):
            return f"in the narrowed graph, {step} makes something else of the same numbers"
    return why


def _same(a: Array, b: Array, limit: float) -> bool:
    """Return True if two arrays agree: floats up to rounding, other types exactly."""
    return a.shape == b.shape and (_distance(a, b) <= limit if b.dtype.kind == "f" else np.array_equal(a, b))


def _portions(trial: Trial) -> list[tuple[list[Step], tuple[str, ...]]]:
    """Return groups of steps for one run each, to limit memory; the last group includes the outputs."""
    facts = trial.survey.facts
    portions = grouped(trial.steps, lambda step: sum(map(facts.bytes_of, step.reads)), AT_ONCE) or [[]]
    return [(some, trial.names if some is portions[-1] else ()) for some in portions]


def _slim(trial: Trial, dead: Bools) -> ir.Model:
    slim = trial.model.clone()
    apply(slim.graph, trial.survey, Ledger(dead=dead, arrays={}))
    return slim


def _masked(trial: Trial, blocks: Sequence[Block], dead: Bools) -> ir.Model:
    """Return the graph of full width in which the dead channels are not read, or if a norm reads them too, not made."""
    model, survey = trial.model, trial.survey
    arrays: dict[str, Array] = {}
    for block in blocks:
        for slot in (s for s in block.slots if (s.role == "consumer") != bool(block.ranked)):
            array = arrays.get(slot.param)
            array = np.array(weights.original(slot.initializer, model, survey) if array is None else array)
            np.moveaxis(array, slot.axis, 0)[slot.index[dead[block.ids]].ravel()] = 0
            arrays[slot.param] = weights.put(array, model.graph.initializers.get(slot.initializer))
    masked = model.clone()
    apply(masked.graph, survey, Ledger(dead=np.zeros_like(dead), arrays=arrays))
    leave_out(masked, survey, dead)
    return masked


def _run(
    providers: Sequence[str], candidate: ir.Model, feeds: Sequence[Feed], names: Sequence[str], *, whole: bool = False
) -> list[dict[str, Array]]:
    """Return the named tensors per feed; a deep graph runs in pieces unless `whole`."""
    parts = None if whole else in_pieces(candidate, feeds, providers, names)
    if parts is not None:
        discard(candidate)
        return parts
    packed = pack(candidate, outputs=names)
    with open_session(packed, Setup.as_is(providers), outputs=names) as session:
        discard(candidate)
        return [session.run(feed) for feed in feeds]


def _left(trial: Trial, name: str, array: Array, dead: Bools) -> Array:
    """Return a tensor of the masked graph without the positions that the narrowed graph lacks."""
    for mark in trial.survey.marks.get(name, ()):
        stays = ~dead[mark.labels]
        if not stays.all() and array.shape[mark.axes[0]] == len(stays):
            array = np.compress(stays, array, axis=mark.axes[0])
    return array


def _gap(trial: Trial, got: Mapping[str, Array], wanted: Mapping[str, Array], names: Sequence[str], dead: Bools) -> str:
    """Return what differs between two runs; '' if nothing does."""
    outputs = {v.name for v in trial.model.graph.outputs}
    for name in names:
        if not isinstance(wanted[name], np.ndarray) or wanted[name].dtype.kind != "f":
            continue
        array = _left(trial, name, wanted[name], dead)
        place = f"output {name}" if name in outputs else _place(trial, name)
        if got[name].shape != array.shape:
            return f"{place} changes its shape from {array.shape} to {got[name].shape}"
        gap = _distance(got[name], array, 1.0 if name in trial.squashed else LEAST)
        if not gap <= trial.limit:
            return f"the narrowed graph differs from the masked one by {gap:.1e} at {place}"
    return ""


def _place(trial: Trial, name: str) -> str:
    """Return the name of a tensor and the step that reads it, as text."""
    reader = next((step for step in trial.steps if name in step.reads), None)
    return name if reader is None else f"{name}, which {reader} reads"


def _distance(a: Array, b: Array, least: float = LEAST) -> float:
    """Return the largest difference relative to the largest value, which counts as at least `least`.

    Positions that are NaN in both agree.
    """
    if not b.size:
        return 0.0
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = np.isnan(a) & np.isnan(b) | (a == b)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        gap = np.where(same, 0.0, np.abs(a - b))
    scale = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    return float(gap.max() / max(scale, least))


def _limit(model: ir.Model) -> float:
    kinds = {v.const_value.dtype for v in model.graph.initializers.values() if v.const_value is not None}
    integers = kinds & {ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4}
    sizes = [k.itemsize for k in kinds if k.is_floating_point()]
    limit = LIMITS.get(int(min(sizes, default=4)), LIMITS[2])
    return max(limit, QUANTISED) if integers else limit
