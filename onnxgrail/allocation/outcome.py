"""The widths that meet a budget, as an allocation, or an error if it is out of reach."""

from __future__ import annotations

from dataclasses import replace

from onnxgrail.allocation.balance import Fit
from onnxgrail.allocation.few import Bits
from onnxgrail.allocation.losses import Search
from onnxgrail.allocation.measures import Measure, built
from onnxgrail.allocation.result import Allocation, Budget, at_widths
from onnxgrail.errors import UsageError
from onnxgrail.graph.bits.plan import NONE
from onnxgrail.machine.amounts import Target


def counted(target: Target | None, measure: Measure, limit: float, fit: Fit) -> Budget | None:
    """Return what widths cost by a measure, beside the limit; None without a target."""
    if target is None:
        return None
    return Budget(target=target, before=measure.given, limit=limit, found=measure(fit.widths))


def answer(search: Search, budget: Budget | None, fit: Fit, used: str, bits: Bits = NONE) -> Allocation:
    """Return the allocation of widths within a budget.

    Raises:
        UsageError: the widths do not meet the budget.
    """
    if budget is not None:
        _reachable(search, budget, fit, bits)
    done = at_widths(search.prepared, search.blocks, search.recipe, fit.widths, fit.ideal)
    return replace(done, budget=budget, used=used)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _reachable(search: Search, budget: Budget, fit: Fit, bits: Bits) -> None:
    if fit.reached:
        return
    real = built(search.prepared, search.job, budget.target.metric, fit.widths, bits)
    budget = replace(budget, found=budget.found if real is None else real)
    spec, unit = (".3g", " ms") if budget.target.metric == "latency" else (",.0f", "")
    share = f"{budget.found / max(budget.before, 1e-9):.1%}"
    least = f"{budget.found:{spec}}{unit} of {budget.before:{spec}}{unit} ({share})"
    ends = [f"all of {_count(len(search.blocks), 'block')} as narrow as possible"] if search.blocks else []
    ends += [f"{_count(len(search.rungs), 'weight')} in as few bits as they may have"] if search.rungs else []
    hint = "Leave out --only-bits" if search.recipe.only_bits else "Allow more, or choose more --blocks"
    hint += "; what else runs on this machine disturbs the measurement" if unit else ""
    raise UsageError(
        f"{budget.target.option} {budget.target.text} is out of reach: with {' and '.join(ends)} {least} stay",
        hint=hint,
    )
