"""From a recipe to widths: the one function that `decision.py` calls before anything else is decided."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from onnxgrail import plan
from onnxgrail.algebra.curves import Narrow, error_curve, fluctuation, widths_measured
from onnxgrail.allocation import schedules
from onnxgrail.allocation.fit import Fit, Ideal, Ladder, Widths, fitted, ladder
from onnxgrail.allocation.lagrange import lagrangian, multiplied, prices
from onnxgrail.allocation.measures import Measure, built, measure_of, stopwatch
from onnxgrail.allocation.result import Allocation, Budget, Curve, rounding_table
from onnxgrail.allocation.statistics import impact, measured
from onnxgrail.allocation.timed import fitted_to_time
from onnxgrail.budget import Metric, Target, target_of
from onnxgrail.calibration.dense import Dense
from onnxgrail.core import Block, Floats, Recipe, View
from onnxgrail.errors import UsageError
from onnxgrail.graph import weights
from onnxgrail.preparation import Prepared
from onnxgrail.progress import Progress

CORRECTIONS = 3
SMALL, LARGE = 1e-6, 1e6  # bounds of shares and weights that are divided by and multiplied with
Trial = Callable[[Mapping[str, int]], float]
"""End-to-end error of the model at these widths, on data it was not fitted to where there are enough."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """What all steps of an allocation need.

    Attributes:
        prepared, recipe, blocks: the model, the choices, the blocks that may be narrowed.
        ladders: of the blocks, in order of depth.
        dense: statistics of the original model where they are at hand.
        narrow: how a block is decided at a width; `trial`: what widths do to the whole.
    """

    prepared: Prepared
    recipe: Recipe
    blocks: tuple[Block, ...]
    ladders: tuple[Ladder, ...]
    dense: Dense | None
    narrow: Narrow
    trial: Trial
    progress: Progress


def simple(recipe: Recipe) -> bool:
    """Whether widths follow from the ratio alone, block by block."""
    return target_of(recipe) is None and (recipe.allocate in ("uniform", "depth") or recipe.keeps_everything)


def by_ratio(prepared: Prepared, blocks: Sequence[Block], recipe: Recipe) -> Allocation:
    """Widths of a simple recipe: the same ratio for every block, or one that grows with depth."""
    ratio = plan.unit_share(recipe)
    widths: Widths = plan.widths(blocks, ratio, recipe.round_to)
    ideal = {b.name: b.units * (1 - ratio) for b in blocks}
    if recipe.allocate == "depth" and ratio > 0:
        ladders = _ladders(blocks, recipe)
        ideal = dict(schedules.depth(ladders)(ratio))
        widths = {one.name: one.nearest(ideal[one.name]) for one in ladders}
    return _allocation(prepared, blocks, recipe, widths, ideal)


def allocate(
    prepared: Prepared,
    blocks: Sequence[Block],
    recipe: Recipe,
    *,
    dense: Dense | None,
    narrow: Narrow,
    trial: Trial,
    progress: Progress,
) -> Allocation:
    """Widths under a budget.

    With a ratio instead of a target the budget is what uniform widths at that ratio need: their multiply-accumulates,
    or their parameters in a model without any.

    Raises:
        UsageError: the budget is out of reach.
    """
    if not blocks:
        return _allocation(prepared, blocks, recipe, {}, {})
    ladders = _ladders(blocks, recipe)
    job = Job(
        prepared=prepared,
        recipe=recipe,
        blocks=tuple(blocks),
        ladders=ladders,
        dense=dense,
        narrow=narrow,
        trial=trial,
        progress=progress,
    )
    target = target_of(recipe)
    metric: Metric = "macs" if target is None else target.metric
    measure = measure_of(prepared, metric)
    if target is None and not measure.before:
        metric, measure = "params", measure_of(prepared, "params")
    if target is not None and metric == "latency":
        return _within_time(job, target, measure)
    uniform = plan.widths(blocks, plan.unit_share(recipe), recipe.round_to)
    limit = measure(uniform) if target is None else target.limit(measure.before)
    if recipe.allocate == "global":
        return _validated(job, metric, measure, limit, target)
    ideal = _schedule(job, recipe.allocate)
    best = _corrected(job, metric, measure, limit, lambda most: fitted(ladders, ideal, measure, most))
    return _result(job, _counted(target, measure, limit, best), best)


def _ladders(blocks: Sequence[Block], recipe: Recipe) -> tuple[Ladder, ...]:
    ordered = sorted(blocks, key=lambda b: sum(b.span))
    return tuple(ladder(b.name, b.units, b.unit_size, recipe.round_to) for b in ordered)


def _schedule(job: Job, name: str) -> Ideal:
    if name == "flap":
        return schedules.flap(job.ladders, _evidence(job, fluctuation))
    return schedules.depth(job.ladders) if name == "depth" else schedules.uniform(job.ladders)


def _evidence(job: Job, read: Callable[[View], T]) -> dict[str, T]:
    """What `read` finds in each block of the original model."""
    prepared = job.prepared
    nothing = weights.empty(prepared.survey)
    if job.dense is not None:
        pairs = iter([(b, job.dense[b.name]) for b in job.blocks])
    else:
        pairs = measured(prepared, job.blocks, job.recipe, progress=job.progress)
    found = {}
    for block, stats in pairs:
        arrays = weights.read(block, prepared.model, prepared.survey, nothing)
        slopes = prepared.gradients.get(block.name)
        found[block.name] = read(View(block=block, weights=arrays, stats=stats, gradient=slopes))
    return found


def _corrected(job: Job, metric: Metric, measure: Measure, limit: float, find: Callable[[float], Fit]) -> Fit:
    """A fit that also holds for the model as it is built, where that weighs a little more than was counted."""
    most = limit
    best = find(most)
    for _ in range(CORRECTIONS):
        real = built(job.prepared, job.recipe, metric, best.widths) if best.reached else None
        if real is None or real <= limit:
            break
        most = limit - max(real - measure(best.widths), 1.0)
        best = find(most)
    return best


# ------------------------------------------------------------------------------------------------------- global


def _validated(job: Job, metric: Metric, measure: Measure, limit: float, target: Target | None) -> Allocation:
    """Lagrangian widths, unless uniform ones within the same budget do less harm to the outputs."""
    plain = schedules.uniform(job.ladders)
    fits = {"uniform": _corrected(job, metric, measure, limit, lambda most: fitted(job.ladders, plain, measure, most))}
    curves: tuple[Curve, ...] = ()
    if fits["uniform"].reached:
        found, curves = _losses(job)
        for name, losses in found.items():
            find = functools.partial(lagrangian, job.ladders, losses, measure)
            fits[name] = _corrected(job, metric, measure, limit, find)
    winner, harm = _least_harm(job, fits)
    budget = _counted(target, measure, limit, fits[winner])
    return replace(_result(job, budget, fits[winner], used=winner, errors=harm), curves=curves)


def _least_harm(job: Job, fits: Mapping[str, Fit]) -> tuple[str, dict[str, float]]:
    """The widths whose outputs are nearest to the original's, uniform ones where it makes no difference."""
    usable = {name: fit for name, fit in fits.items() if fit.reached}
    if all(fit.widths == fits["uniform"].widths for fit in usable.values()):  # also where nothing is within reach
        return "uniform", {}
    harm: dict[str, float] = {}
    for name, fit in usable.items():
        twin = next((n for n in harm if usable[n].widths == fit.widths), None)
        harm[name] = job.trial(fit.widths) if twin is None else harm[twin]
    return min(harm, key=lambda name: (harm[name], name != "uniform")), harm


def curves(
    prepared: Prepared, blocks: Sequence[Block], recipe: Recipe, *, narrow: Narrow, progress: Progress
) -> tuple[Curve, ...]:
    """What narrowing each block alone does, at several widths and to the outputs: for a report, no width follows."""
    job = Job(
        prepared=prepared,
        recipe=recipe,
        blocks=tuple(blocks),
        ladders=_ladders(blocks, recipe),
        dense=None,
        narrow=narrow,
        trial=lambda _: 0.0,
        progress=progress,
    )
    return _losses(job)[1]


def _losses(job: Job) -> tuple[dict[str, dict[str, Floats]], tuple[Curve, ...]]:
    """What a block's error does to the outputs: block name -> loss at each step of its ladder, by two weightings.

    The loss is −w log(1 − e): shares that get through multiply, and a block that loses nearly all is no bargain.  The
    weight w is what halving this block alone does to the outputs, over its own error e then.  Effects that are
    measured one by one need not add up, so a second candidate trusts them less (`global-sqrt`).  The curves behind it
    come along, for the report.
    """

    def read(view: View) -> tuple[Floats, float]:
        curve = error_curve(view, job.narrow)
        half = max(1, view.block.units // 2)
        effect = impact(job.prepared, job.recipe, job.narrow(view, half))
        return curve, effect

    found = _evidence(job, read)
    losses: dict[str, dict[str, Floats]] = {"global": {}, "global-sqrt": {}}
    for one in job.ladders:
        curve, effect = found[one.name]
        weight = min(effect / max(float(curve[max(1, one.units // 2)]), SMALL), LARGE)
        lost = -np.log(np.maximum(1 - curve[np.array(one.steps)], SMALL))
        losses["global"][one.name] = weight * lost
        losses["global-sqrt"][one.name] = math.sqrt(weight) * lost
    return losses, tuple(_curve(one, *found[one.name]) for one in job.ladders)


def _curve(one: Ladder, errors: Floats, effect: float) -> Curve:
    points = tuple((kept, float(errors[kept])) for kept in widths_measured(one.units))
    return Curve(block=one.name, units=one.units, points=points, effect=effect)


# ------------------------------------------------------------------------------------------------------ latency


def _within_time(job: Job, target: Target, macs: Measure) -> Allocation:
    watch, asked = stopwatch(job.prepared, job.recipe), job.recipe.allocate
    ideals = {"uniform": schedules.uniform(job.ladders)} if asked == "global" else {asked: _schedule(job, asked)}
    curves: tuple[Curve, ...] = ()
    if asked == "global":
        full: Widths = {one.name: one.units for one in job.ladders}
        costs = {one.name: prices(one, macs, full) for one in job.ladders}
        every, curves = _losses(job)
        for name, losses in every.items():
            ideals[name] = multiplied(job.ladders, losses, costs)
    found = {name: fitted_to_time(job.ladders, ideal, watch, target) for name, ideal in ideals.items()}
    used, harm = _least_harm(job, {n: t.fit for n, t in found.items()}) if asked == "global" else (asked, {})
    best = found[used]
    budget = Budget(target=target, before=best.before, limit=best.limit, found=best.found)
    return replace(_result(job, budget, best.fit, used=used, errors=harm), curves=curves)


# ------------------------------------------------------------------------------------------------------ results


def _counted(target: Target | None, measure: Measure, limit: float, fit: Fit) -> Budget | None:
    if target is None:
        return None
    return Budget(target=target, before=measure.before, limit=limit, found=measure(fit.widths))


def _result(
    job: Job, budget: Budget | None, fit: Fit, *, used: str | None = None, errors: Mapping[str, float] | None = None
) -> Allocation:
    if budget is not None:
        _reachable(job, budget, fit)
    used = (used or job.recipe.allocate).removesuffix("-sqrt")
    ideal = fit.widths if used == "global" else fit.ideal  # global chooses among widths that fit: it rounds nothing
    done = _allocation(job.prepared, job.blocks, job.recipe, fit.widths, ideal)
    note = "" if used == done.asked else f"allocation {done.asked} was no better than {used}, which is used"
    return replace(done, budget=budget, used=used, errors=errors, note=note)


def _reachable(job: Job, budget: Budget, fit: Fit) -> None:
    if fit.reached:
        return
    spec, unit = (".3g", " ms") if budget.target.metric == "latency" else (",.0f", "")
    share = f"{budget.found / max(budget.before, 1e-9):.1%}"
    least = f"{budget.found:{spec}}{unit} of {budget.before:{spec}}{unit} ({share})"
    hint = "Allow more, choose more --blocks" + (", or use --round-to 1" if job.recipe.round_to > 1 else "")
    hint += "; what else runs on this machine disturbs the measurement" if unit else ""
    raise UsageError(
        f"{budget.target.option} {budget.target.text} is out of reach: with all of {len(job.blocks)} blocks as narrow "
        f"as possible {least} stay",
        hint=hint,
    )


def _allocation(
    prepared: Prepared, blocks: Sequence[Block], recipe: Recipe, widths: Mapping[str, int], ideal: Mapping[str, float]
) -> Allocation:
    meter = measure_of(prepared, "params").meter
    weighs = {b.name: _slope(b, widths, meter.near) for b in blocks}
    return Allocation(
        asked=recipe.allocate,
        used=recipe.allocate,
        widths=widths,
        rounding=rounding_table(blocks, widths, ideal, weighs),
    )


def _slope(block: Block, widths: Mapping[str, int], near: Callable[[Block, int, Mapping[str, int]], int]) -> float:
    """Parameters of one unit of a block beside the others at their widths."""
    kept = widths[block.name]
    other = kept - 1 if kept == block.units else kept + 1
    return abs(near(block, other, widths) - near(block, kept, widths))
