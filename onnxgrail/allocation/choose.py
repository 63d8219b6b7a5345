"""Converts a recipe to widths, before anything else is decided."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from onnxgrail.algebra.moments.curves import fluctuation
from onnxgrail.allocation import schedules
from onnxgrail.allocation.balance import PROMISE, Fit, balanced, by_units
from onnxgrail.allocation.few import Bits, Moved, fewest, given_bits, held, lowered, plain, raised, with_bits
from onnxgrail.allocation.ladders import Cost, Ideal, Widths, ladders_of
from onnxgrail.allocation.losses import Search, Way, Ways, evidence, simple, tells
from onnxgrail.allocation.measures import Measure, built, measure_of, of_result
from onnxgrail.allocation.outcome import answer, counted
from onnxgrail.allocation.result import Allocation, Budget, at_widths
from onnxgrail.allocation.timed import Timing, fitted_to_time, stopwatch
from onnxgrail.calibration.prepared import Prepared
from onnxgrail.calibration.runtime.blocking import channel_block
from onnxgrail.calibration.runtime.session import CPU
from onnxgrail.core import Block, Recipe
from onnxgrail.errors import UsageError, meant
from onnxgrail.graph.bits.plan import NONE
from onnxgrail.machine.amounts import Target, target_of
from onnxgrail.options import Metric

CORRECTIONS = 3
BLOCKED = 8  # the same for weights in a few bits, whose blocks do not shrink with every channel
TIMED = 0.7  # share of the multiply-accumulates near which losses are measured for a latency in milliseconds
SLIGHT = 0.1  # least share of the units near which losses are measured if bits are chosen, too
PROVED = 0.5  # share of each block that a proof removes before widths are known


def at_first(prepared: Prepared, blocks: Sequence[Block], recipe: Recipe) -> Allocation:
    """Return the widths of a simple recipe; else preliminary widths at which blocks are proved.

    Raises:
        UsageError: the recipe gives a width to a block that does not have it.
    """
    if recipe.widths is not None:
        widths = given(prepared.survey.blocks, blocks, recipe.widths)
        return replace(at_widths(prepared, blocks, recipe, widths, widths), bits=given_bits(prepared, recipe))
    if not simple(recipe):
        half = by_units(blocks, PROVED, 1)
        return Allocation(asked=recipe.allocate, used=recipe.allocate, widths=half, rounding=())
    share = recipe.unit_ratio or 0.0
    widths = by_units(blocks, share, recipe.round_to)
    ideal = {b.name: b.units * (1 - share) for b in blocks}
    if recipe.allocate == "depth" and share > 0:
        ladders = ladders_of(blocks, recipe.round_to)
        ideal = dict(schedules.depth(ladders)(share))
        widths = {one.name: one.nearest(ideal[one.name]) for one in ladders}
    return at_widths(prepared, blocks, recipe, widths, ideal)


def given(every: Sequence[Block], chosen: Sequence[Block], widths: Mapping[str, int]) -> Widths:
    """Return the widths of the chosen blocks: those given, and all units of the others.

    Args:
        every: the blocks of the model.
        chosen: those of them that may be narrowed.
        widths: block name to units that stay.

    Raises:
        UsageError: a block does not exist, may not be narrowed, or does not have so many units.
    """
    units, allowed = {b.name: b.units for b in every}, {b.name for b in chosen}
    for name, width in widths.items():
        if name not in units:
            hint = f"{meant(name, units)} `onnxgrail inspect` lists the blocks".lstrip()
            raise UsageError(f"widths name the block {name!r}, which the model does not have", hint=hint)
        if name not in allowed:
            raise UsageError(f"widths name the block {name!r}, which --blocks, --include or --exclude leave out")
        if not 1 <= width <= units[name]:
            raise UsageError(f"widths give block {name!r} {width} units, expected 1 to {units[name]}")
    return {b.name: widths.get(b.name, b.units) for b in chosen}


def by_ratio(prepared: Prepared, blocks: Sequence[Block], ratio: float, round_to: int) -> Widths:
    """Return widths at which blocks, all narrowed by the same share, lose `ratio` of the parameters in them.

    Args:
        prepared: the model.
        blocks: the blocks to narrow.
        ratio: share of their parameters, from 0 to 1.
        round_to: wanted multiple of the width in features.
    """
    if not blocks:
        return {}
    ladders, measure = ladders_of(blocks, round_to), measure_of(prepared, "params")
    limit = measure.share(blocks, ratio)
    return balanced(ladders, schedules.uniform(ladders), measure, limit, strict=False).widths


def allocate(search: Search) -> Allocation:
    """Return widths under a budget.

    Without a target, the budget is the share of the parameters in the blocks that `ratio` leaves, or the
    multiply-accumulates of blocks that all lose `unit_ratio` of their units (their parameters, in a model without
    multiply-accumulates).

    Raises:
        UsageError: a target is out of reach.
    """
    recipe = search.recipe
    target = target_of(recipe)
    if not search.blocks and not search.rungs:
        return _as_it_is(search, target)
    if target is not None and target.metric == "latency":
        return _within_time(search, target, measure_of(search.prepared, "latency"))
    metric, measure, limit = _limit(search, target)
    if search.rungs and target is not None:
        return _within_size(search, target, measure, limit)
    used, ideal = _schedule(search, measure, limit)
    find = functools.partial(balanced, search.ladders, ideal, measure, strict=target is not None)
    best = _corrected(search, metric, limit, measure, find)
    return answer(search, counted(target, measure, limit, best), best, used)


def _as_it_is(search: Search, target: Target | None) -> Allocation:
    """Return the allocation of a model that loses nothing, with the budget if a size is met nevertheless."""
    done = at_widths(search.prepared, search.blocks, search.recipe, {}, {})
    if target is None or target.metric != "size":
        return done
    _, measure, limit = _limit(search, target)
    return replace(done, budget=counted(target, measure, limit, _whole(search))) if measure({}) <= limit else done


def _limit(search: Search, target: Target | None) -> tuple[Metric, Measure, float]:
    """Return the metric, its measure, and the limit."""
    prepared, recipe = search.prepared, search.recipe
    if target is not None:
        measure = of_result(prepared, search.job, target.metric)
        return target.metric, measure, target.limit(measure.given)
    if recipe.unit_ratio is None:
        measure = measure_of(prepared, "params")
        return "params", measure, measure.share(search.blocks, recipe.ratio or 0.0)
    measure = measure_of(prepared, "macs")
    metric: Metric = "macs"
    if not measure.before:
        metric, measure = "params", measure_of(prepared, "params")
    return metric, measure, measure(by_units(search.blocks, recipe.unit_ratio, recipe.round_to))


def _schedule(search: Search, measure: Measure, limit: float) -> tuple[str, Ideal]:
    """Return the schedule of a recipe, with its name; `auto` is `global` where data can tell, else `uniform`."""
    name, plain = search.recipe.allocate, schedules.uniform(search.ladders)
    if name == "auto":
        name = "global" if tells(search.prepared, search.recipe) else "uniform"
    if name == "global":
        return name, search.least_harm(measure, limit)
    if name == "flap" and search.ladders:
        return name, schedules.flap(search.ladders, evidence(search, fluctuation))
    return name, schedules.depth(search.ladders) if name == "depth" else plain


def _corrected(
    search: Search, metric: Metric, limit: float, measure: Cost, find: Callable[[float], Fit], bits: Bits = NONE
) -> Fit:
    """Find a fit that also holds for the built model, which may be a little larger or smaller than counted.

    Blocks between two convolutions stay whole where one costs less.
    """

    def paying(most: float) -> Fit:
        fit = find(most)
        return replace(fit, widths=search.prepared.paying(fit.widths, measure))

    most, best = limit, paying(limit)
    if target_of(search.recipe) is None:
        return best
    known: dict[tuple[int, ...], float] = {}

    def off(fit: Fit) -> float:
        """Return the cost of the built model beyond the counted one; 0 if it is not built."""
        widths = tuple(fit.widths.values())
        if widths not in known:
            real = built(search.prepared, search.job, metric, fit.widths, bits)
            known[widths] = 0.0 if real is None else real - measure(fit.widths)
        return known[widths]

    def over(fit: Fit) -> float:
        return measure(fit.widths) + off(fit) - limit

    tries = BLOCKED if bits or (metric == "size" and search.recipe.uses_tool) else CORRECTIONS
    for _ in range(tries):
        if not best.reached or over(best) <= 0:
            break
        most = min(limit - max(off(best), 1.0), most - over(best) if tries == BLOCKED else limit)
        best = paying(most)
    if not best.reached:
        best = replace(best, reached=over(best) <= 0)
    low, high = limit, limit - off(best)
    for _ in range(tries):  # weights that get so small that they keep their bits
        if not best.reached or high <= low or over(best) >= -PROMISE * limit:
            break
        wider = paying(high)
        if wider.reached and over(wider) <= 0:
            best, low, high = wider, high, limit - off(wider)
        else:
            high = (low + high) / 2
    return best


# --------------------------------------------------------------------------------------------------------- size


def _within_size(search: Search, target: Target, measure: Measure, limit: float) -> Allocation:
    """Return bits and widths that lose least within a size.

    Bits are raised again as far as the size allows.
    """
    search, measure = with_names(search, measure)
    if measure.given <= limit and search.recipe.chooses_bits:
        return answer(search, counted(target, measure, limit, _whole(search)), _whole(search), search.recipe.allocate)
    used, ways = _ways(search, measure, limit)
    found = [_sized(search, measure, limit, way) for way in ways.found]
    found = [one for one in found if one[0].reached] or found[:1]
    best, bits = found[ways.least([(fit.widths, bits) for fit, bits in found]) if len(found) > 1 else 0]
    measure = _measured(search, measure, best, bits) if best.reached else measure
    budget = counted(target, with_bits(measure, search.rungs, bits), limit, best)
    return replace(answer(search, budget, best, used, bits), bits=bits)


def _sized(search: Search, measure: Measure, limit: float, way: Way) -> tuple[Fit, Bits]:
    """Return the widths and bits of a way within a size."""
    rungs, (bits, ideal) = search.rungs, way
    ladders = search.ladders if ideal is not None else ()

    def found(bits: Bits) -> Fit:
        cost, schedule = with_bits(measure, rungs, bits), ideal or schedules.uniform(())
        best = _corrected(search, "size", limit, cost, functools.partial(balanced, ladders, schedule, cost), bits)
        return best if ladders else replace(_whole(search), reached=best.reached)

    best, least = found(bits), fewest(rungs)
    if not best.reached and search.recipe.chooses_bits:  # a few bytes are more than counted
        fewer = _held(search, measure, limit, (best, bits), lowered)
        bits, best = (fewer, found(fewer)) if fewer is not None else (bits, best)
    if not best.reached and bits != least:
        bits, best = least, found(least)
    if best.reached and search.recipe.chooses_bits:
        bits = _held(search, measure, limit, (best, bits), raised) or bits
    return best, bits


def _held(search: Search, measure: Measure, limit: float, fit: tuple[Fit, Bits], moved: Moved) -> Bits | None:
    """Return lowered or raised bits with which the built model stays within a size; None if none were found."""
    best, bits = fit
    here = _measured(search, measure, best, bits)
    return held(
        limit,
        lambda bits: with_bits(here, search.rungs, bits)(best.widths),
        functools.partial(moved, search.rungs, bits),
        lambda bits: built(search.prepared, search.job, "size", best.widths, bits),
    )


def _ways(search: Search, measure: Measure, limit: float) -> tuple[str, Ways]:
    """Return the name of the schedule, and the ways to choose bits and widths."""
    rungs = search.rungs
    bits = None if search.recipe.chooses_bits else fewest(rungs)
    if bits is None and search.together is not None and search.recipe.allocate in ("auto", "global"):
        few = with_bits(measure, rungs, fewest(rungs))
        even = balanced(search.ladders, schedules.uniform(search.ladders), few, limit, strict=False).widths
        lost = [1 - even[one.name] / one.units for one in search.ladders]
        return "global", search.together(measure, max(SLIGHT, float(np.mean(lost or [0.0]))), limit)
    if bits is None:
        bits = plain(rungs, lambda bits: with_bits(measure, rungs, bits)({}) <= limit)
    used, ideal = _schedule(search, with_bits(measure, rungs, bits), limit)
    return used, Ways([(bits, ideal)], lambda _: 0)


def _whole(search: Search) -> Fit:
    full = {one.name: one.units for one in search.ladders}
    return Fit(full, dict(full), reached=True)


def with_names(search: Search, measure: Measure) -> tuple[Search, Measure]:
    """Return the search and the measure that count the names and nodes that weights in a few bits need."""
    if not search.rungs:
        return search, measure
    whole, least = _whole(search), fewest(search.rungs)
    measure = _measured(search, measure, whole, NONE)
    more = _measured(search, measure, whole, least).before - measure.before
    each = max(more, 0.0) / len(search.rungs)
    rungs = tuple(rung.named(each) for rung in search.rungs)
    return replace(search, rungs=rungs), replace(measure, before=measure.before + min(more, 0.0))


def _measured(search: Search, measure: Measure, fit: Fit, bits: Bits) -> Measure:
    """Return the measure that counts what the built model of a fit takes."""
    real = built(search.prepared, search.job, "size", fit.widths, bits)
    more = 0.0 if real is None else real - with_bits(measure, search.rungs, bits)(fit.widths)
    return replace(measure, before=measure.before + more)


# ------------------------------------------------------------------------------------------------------ latency


def _within_time(search: Search, target: Target, macs: Measure) -> Allocation:
    """Return the widths that keep most multiply-accumulates within the time, over multiples of `round_to`."""
    watch = stopwatch(search.prepared, search.recipe)
    used, ideal = _schedule(search, macs, (TIMED if target.share is None else target.share) * macs.given)
    found: dict[int, Timing] = {}
    for multiple in _multiples(search):
        ladders = ladders_of(search.blocks, multiple)
        found[multiple] = fitted_to_time(ladders, ideal, watch, target)
    widest = _widest(found, macs)
    best = found[widest]
    budget = Budget(target=target, before=best.before, limit=best.limit, found=best.found)
    done = answer(search, budget, best.fit, used)
    tried = {multiple: macs(timing.fit.widths) for multiple, timing in found.items()}
    return replace(done, note="; ".join(filter(None, [done.note, _preferred(widest, tried)])))


def _multiples(search: Search) -> list[int]:
    """Return the multiples to try: that of the recipe, and the block size of convolution kernels on this machine."""
    asked = search.recipe.round_to
    if (
        asked == 1
        or search.recipe.providers[0] not in CPU
        or not any(map(search.prepared.survey.convolved, search.blocks))
    ):
        return [asked]
    return sorted({asked, math.lcm(asked, channel_block())})


def _widest(found: Mapping[int, Timing], macs: Measure) -> int:
    """Return the multiple that keeps most within the time."""
    fits = {multiple: timing.fit for multiple, timing in found.items()}
    return max(fits, key=lambda multiple: (fits[multiple].reached, macs(fits[multiple].widths), -multiple))


def _preferred(multiple: int, tried: Mapping[int, float]) -> str:
    """Return a note on the compared multiples, '' if only one was tried."""
    if len(tried) < 2:
        return ""
    kept = ", ".join(f"{kept:,.0f} with multiples of {number}" for number, kept in sorted(tried.items()))
    return f"widths are multiples of {multiple}: multiply-accumulates left within the time are {kept}"
