"""Errors of runs that write no model: no block to narrow, or a result larger than the input."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxgrail.allocation.found import Found, Judged, rounded_up
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.repaired import needs_option
from onnxgrail.core import Block, Recipe, Refusal
from onnxgrail.errors import NothingToCompressError
from onnxgrail.finishing.ship import outgrown
from onnxgrail.finishing.shipped import Shipped
from onnxgrail.job.places import Places
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.decide import Decision
from onnxgrail.options import Metric
from onnxgrail.report.build import report_of
from onnxgrail.report.notes import empty_caches, fewer_bits
from onnxgrail.report.sizes import Made
from onnxgrail.report.summary import nothing_text
from onnxgrail.search.latency import slower

ENDLESS = "numbers that are NaN or infinite where those of the original are finite"
UNITS = {"params": "parameters", "macs": "multiply-accumulates", "size": "bytes"}


def check_gain(prepared: Prepared, decision: Decision, shipped: Shipped, job: Job, places: Places) -> None:
    """Refuse a result that is larger than the input, loses too much, or is slower although latency was minimized.

    Args:
        prepared: the input model and its data.
        decision: the narrowing that was decided.
        shipped: the result.
        job: the run.
        places: files to which the report is written if the result is refused.

    Raises:
        NothingToCompressError: the result is larger, loses too much, or is slower.
    """
    grown = outgrown(prepared, shipped, job.recipe)
    if grown is not None:
        raise _refused(prepared, decision, job, places, *grown)
    search = decision.allocation.found
    if search is not None and shipped.exceeds(search):
        loss = shipped.keys["quantization"]["loss"]
        text = f"the quantized model {_may_lose(loss['bound'])}, more than --max-loss {100 * search.limit:g}%"
        cause = "--minimize size" if job.recipe.quantize == "none" else "--quantize"
        hint = _any_of(_larger(loss["bound"]), f"leave out {cause}")
        raise _refused(prepared, decision, job, places, f"{text}; nothing is written", hint)
    if any(output["broken"] for output in (shipped.keys.get("quantization") or {}).get("outputs", ())):
        text = f"the quantized model gives {ENDLESS}; nothing is written"
        raise _refused(prepared, decision, job, places, text, "Give another --quantize, or leave it out")
    if search is None or search.minimize != "latency" or not decision.changes:
        return
    with job.clock.stage("latency"):
        times = slower(prepared, shipped.model, job.recipe)
    if times is not None and times.ratio is not None:
        text = f"the result would take {1 / times.ratio:.2f} times as long as the input; nothing is written"
        raise _refused(prepared, decision, job, places, text, "Give --minimize size, or another --round-to")


def nothing(prepared: Prepared, decision: Decision, job: Job, places: Places) -> NothingToCompressError:
    """Return the error of a run without any narrowed block; its report is also written to its files."""
    recipe, chosen, hint = job.recipe, decision.chosen, ""
    budget, search = decision.allocation.budget, decision.allocation.found
    if search is not None and (decision.narrowable or (recipe.only_bits and search.tried)):
        text, hint = _beyond(search, recipe.quantize)
    elif budget is not None and budget.before <= budget.limit:
        allowed, given = (_cost(value, budget.target.metric) for value in (budget.limit, budget.before))
        asked = f"{budget.target.option} {budget.target.text}"
        text = f"nothing could be compressed: {asked} allows {allowed} and the model has {given}"
    elif recipe.only_bits:
        text = f"nothing could be compressed: {decision.allocation.note or 'all weights keep their bits'}"
        hint = "Leave out --only-bits"
    elif chosen and not decision.refusals and budget is None:
        text = f"nothing could be compressed: {_amount(recipe)} no unit from any of {len(chosen)} blocks"
    else:
        text, hint = no_blocks(prepared, chosen, decision.refusals)
    hint = empty_caches(prepared, recipe) or hint
    tried = [] if search is None else [one.loss.bound for one in search.tried]
    if recipe.quantize != "none" and (not tried or math.isfinite(min(tried))):
        alone = f"--ratio 0 --quantize {recipe.quantize} quantizes without narrowing"
        hint = f"{hint}; {alone}" if hint else alone
    return _refused(prepared, decision, job, places, text, hint)


def no_blocks(prepared: Prepared, chosen: Sequence[Block], refusals: Sequence[Refusal]) -> tuple[str, str]:
    """Return why a model has no block to narrow, and a hint.

    Args:
        prepared: the model.
        chosen: the blocks that the recipe selects.
        refusals: those of them that did not pass the proof.
    """
    found = prepared.survey.blocks
    left = [refusal for refusal in prepared.survey.refusals if needs_option(refusal)]
    if not found or chosen or left:
        return nothing_text([*(left or prepared.survey.refusals), *refusals]), ""
    kinds = ", ".join(dict.fromkeys(b.kind for b in found))
    text = f"nothing could be compressed: none of the {len(found)} blocks is of the kinds and names asked for"
    return text, f"They are of kind {kinds}; `onnxgrail inspect` names them"


def _cost(value: float, metric: Metric) -> str:
    """Return a cost with its unit: 221,994 parameters, 0.185 ms."""
    return f"{value:.3g} ms" if metric == "latency" else f"{value:,.0f} {UNITS[metric]}"


def _amount(recipe: Recipe) -> str:
    """Return what sets the widths, with its verb."""
    if recipe.widths is not None:
        return "the widths remove"
    ratio, of = (recipe.ratio, "ratio") if recipe.unit_ratio is None else (recipe.unit_ratio, "unit ratio")
    return f"{of} {ratio:g} removes"


def _may_lose(bound: float) -> str:
    return f"may lose up to {bound:.2%}" if math.isfinite(bound) else f"gives {ENDLESS}"


def _larger(bound: float) -> str:
    """Return the option for a larger loss; '' if none is allowed."""
    return f"Give --max-loss {100 * rounded_up(bound):.3g}% or more" if rounded_up(bound) < 1 else ""


def _any_of(*hints: str) -> str:
    """Return hints as one sentence."""
    text = ", or ".join(filter(None, hints))
    return text[:1].upper() + text[1:]


def _samples(loss: Judged, limit: float) -> str:
    """Return what makes a bound closer: a number of samples where nothing differs, because that is only counted."""
    if loss.scarce:
        return f"samples with more in them: {loss.scarce}"
    if loss.mean > 0 or not 0 < loss.bound < 1:
        return "more samples for a closer bound"
    count = math.ceil(loss.samples * loss.bound / limit)
    return f"about {count:,} samples, because equal values are only counted; scores as an output need fewer"


def _beyond(search: Found, kind: str) -> tuple[str, str]:
    """Return why a search ended without a step, and a hint."""
    text = f"nothing can go within --max-loss {100 * search.limit:g}%"
    if search.cheapest is None or not search.tried:
        other = "--minimize size, " if search.minimize == "latency" else ""
        return f"{text}: no block has a step that saves {search.minimize}", f"Give {other}a larger loss, or a --ratio"
    block, width, units = search.cheapest
    lowest = min((one.loss for one in search.tried), key=lambda loss: loss.bound)
    whole = [one.loss for one in search.tried if not one.steps]
    step = f"--quantize {kind} alone" if lowest in whole else f"the cheapest step, {block} {units} -> {width},"
    name = f"{lowest.name} of {lowest.output}" if lowest.output else lowest.name
    measured = (
        f"a loss of {lowest.mean:.2%} on {lowest.samples} samples ({name}), which may be up to {lowest.bound:.2%}"
    )
    text += f": {step} " + (f"has {measured}" if math.isfinite(lowest.bound) else f"gives {ENDLESS} ({name})")
    others = _samples(lowest, search.limit) if math.isfinite(lowest.bound) else "give another --quantize"
    hint = _any_of(_larger(lowest.bound), others)
    bits = fewer_bits(search.minimize, kind)
    return text, f"{hint}; {bits}" if bits else hint


def _refused(
    prepared: Prepared, decision: Decision, job: Job, places: Places, text: str, hint: str
) -> NothingToCompressError:
    report = report_of(prepared, job, decision, Made())
    if job.first:
        places.save_report(report)
    return NothingToCompressError(text, hint=hint, report=report)
