"""Schedules, rounding and budgets on made-up blocks whose best widths can be found by trying all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgrail.allocation.balance import PROMISE, Fit, balanced
from onnxgrail.allocation.ladders import Ladder, ladder
from onnxgrail.allocation.schedules import between, depth, depth_ratios, flap, uniform
from onnxgrail.allocation.timed import fitted_to_time, rounded
from onnxgrail.machine.amounts import parse
from onnxgrail.search.harms import Harm
from onnxgrail.search.path import Paths, schedule_of


def linear(prices: Mapping[str, float], rest: float = 0.0) -> Any:
    """A cost that is a sum over blocks."""
    return lambda widths: rest + sum(prices[name] * width for name, width in widths.items())


def chain(ladders: list[Ladder]) -> Any:
    """Parameters of a chain of layers: each weight is cut by the blocks on both of its sides."""

    def cost(widths: Mapping[str, int]) -> float:
        row = [5, *(widths[one.name] for one in ladders), 7]
        return float(sum(a * b for a, b in itertools.pairwise(row)))

    return cost


some_ladders = st.lists(
    st.tuples(st.integers(2, 200), st.sampled_from([1, 4, 64]), st.sampled_from([1, 8])), min_size=1, max_size=5
).map(lambda rows: [ladder(str(n), *row) for n, row in enumerate(rows)])


@pytest.mark.parametrize(
    ("units", "size", "round_to", "steps"),
    [
        (32, 1, 8, (8, 16, 24, 32)),
        (20, 1, 8, (4, 8, 12, 16, 20)),
        (16, 1, 8, (4, 8, 12, 16)),
        (15, 1, 8, (2, 4, 6, 8, 10, 12, 14, 15)),
        (4, 64, 8, (1, 2, 3, 4)),
        (8, 2, 8, (2, 4, 6, 8)),
        (30, 1, 12, (6, 12, 18, 24, 30)),
        (3, 1, 1, (1, 2, 3)),
    ],
)
def test_ladders(units: int, size: int, round_to: int, steps: tuple[int, ...]) -> None:
    assert ladder("a", units, size, round_to).steps == steps


@given(some_ladders)
def test_steps_of_a_ladder_follow_each_other(ladders: list[Ladder]) -> None:
    for one in ladders:
        for step in one.steps:
            assert one.nearest(step) == step


@given(some_ladders, st.floats(0.01, 1.0), st.sampled_from(["uniform", "depth"]))
def test_a_budget_is_met_within_one_per_cent_or_no_step_fits(ladders: list[Ladder], share: float, name: str) -> None:
    cost = chain(ladders)
    full = cost({one.name: one.units for one in ladders})
    limit = share * full
    ideal = {"uniform": uniform, "depth": depth}[name](ladders)
    fit = balanced(ladders, ideal, cost, limit)
    assert fit == balanced(ladders, ideal, cost, limit)
    assert all(1 <= fit.widths[one.name] <= one.units for one in ladders)
    assert fit.reached == (cost({one.name: 1 for one in ladders}) <= limit)
    if not fit.reached:
        return
    assert cost(fit.widths) <= limit
    if cost(fit.widths) < (1 - PROMISE) * limit:
        for one in ladders:
            up = fit.widths[one.name] + 1  # unless it already loses less than half of what it was asked to
            kept = one.units - up < 0.5 * (one.units - fit.ideal[one.name])
            assert kept or cost(fit.widths | {one.name: up}) > limit


@given(some_ladders, st.floats(0.05, 1.0), st.floats(0.05, 1.0))
def test_a_larger_budget_leaves_more(ladders: list[Ladder], a: float, b: float) -> None:
    cost = chain(ladders)
    full = cost({one.name: one.units for one in ladders})
    few, many = (balanced(ladders, uniform(ladders), cost, share * full) for share in sorted((a, b)))
    if few.reached:
        assert many.reached
        assert all(few.ideal[one.name] <= max(many.ideal[one.name], 1) + 1e-6 for one in ladders)


def test_uniform_takes_the_same_share_of_each() -> None:
    ladders = [ladder("a", 100, 1, 1), ladder("b", 1000, 1, 1)]
    fit = balanced(ladders, uniform(ladders), linear({"a": 3.0, "b": 1.0}), 650.0)
    assert fit.widths["a"] == pytest.approx(50, abs=1)
    assert fit.widths["b"] == pytest.approx(500, abs=2)


@given(st.integers(1, 60), st.floats(0.01, 0.99))
def test_depth_ratios_rise_with_the_logarithm_and_have_the_mean(number: int, mean: float) -> None:
    ratios = depth_ratios(number, mean)
    assert len(ratios) == number
    assert np.mean(ratios) == pytest.approx(mean)
    assert all(0 < r <= 1 + 1e-9 for r in ratios)
    assert ratios == sorted(ratios)
    if number > 2:
        steps = np.diff(ratios) / np.diff(np.log(np.arange(1, number + 1)))
        np.testing.assert_allclose(steps, steps[0], rtol=1e-6)


def test_the_first_depth_ratio_is_half_the_mean() -> None:
    assert depth_ratios(12, 0.3)[0] == pytest.approx(0.15)
    assert depth_ratios(12, 0.95)[-1] == 1.0  # no block can lose more than all


def test_flap_keeps_the_highest_scores_of_all_blocks_together() -> None:
    ladders = [ladder("a", 4, 1, 1), ladder("b", 4, 1, 1)]
    scores = {"a": np.array([5.0, 4.0, 3.0, -1.0]), "b": np.array([2.0, 1.0, -2.0, -3.0])}
    fit = balanced(ladders, flap(ladders, scores), linear({"a": 1.0, "b": 1.0}), 5.0)
    assert fit.widths == {"a": 3, "b": 2}


def test_flap_leaves_one_unit_where_all_scores_are_low() -> None:
    ladders = [ladder("a", 4, 1, 1), ladder("b", 4, 1, 1)]
    scores = {"a": np.arange(4.0) + 10, "b": np.arange(4.0)}
    fit = balanced(ladders, flap(ladders, scores), linear({"a": 1.0, "b": 1.0}), 4.0)
    assert fit.widths == {"a": 3, "b": 1}


# -------------------------------------------------------------------------------------------------- least harm


def quadratic(name: str, units: int, scale: float) -> Harm:
    """A block whose loss grows with the square of the removed share."""
    levels = tuple(range(units - 1, 0, -1))
    errors = tuple(((units - level) / units) ** 2 for level in levels)
    return Harm(name, units, "values", levels, tuple(scale * error for error in errors), errors)


def lost(harms: list[Harm], fit: Fit) -> float:
    return sum(dict(zip(h.levels, h.losses, strict=True)).get(fit.widths[h.block], 0.0) for h in harms)


@given(st.integers(0, 10_000), st.floats(0.2, 0.75))  # above that, a unit of a small block decides
@settings(max_examples=40)
def test_a_path_is_a_schedule_that_loses_no_more_than_uniform_widths(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    ladders = [ladder(str(n), int(rng.integers(8, 40)), 1, 1) for n in range(4)]
    harms = [quadratic(one.name, one.units, float(rng.uniform(0.001, 0.1))) for one in ladders]
    cost = chain(ladders)
    limit = share * cost({one.name: one.units for one in ladders})
    ideal = schedule_of(Paths(harms, cost, 1.0, math.inf).within(math.inf))
    fit, even = (balanced(ladders, one, cost, limit) for one in (ideal, uniform(ladders)))
    assert fit.reached
    assert cost(fit.widths) <= limit
    assert lost(harms, fit) <= 1.15 * lost(harms, even) + 1e-9  # rounding may take a unit more of a block


def test_between_two_schedules_is_the_geometric_mean_of_their_widths() -> None:
    ladders = [ladder("a", 16, 1, 1), ladder("b", 9, 1, 1)]
    middle = between(uniform(ladders), lambda s: {"a": 16.0, "b": 9 * (1 - s) ** 3})
    assert middle(0.0) == {"a": 16, "b": 9}
    assert middle(0.75) == {"a": 8, "b": pytest.approx(9 / 16)}


def test_a_schedule_of_a_path_begins_whole_and_ends_with_nothing() -> None:
    harms = [quadratic("a", 8, 0.1), quadratic("b", 8, 0.01)]
    ideal = schedule_of(Paths(harms, linear({"a": 1.0, "b": 1.0}), 1.0, math.inf).within(math.inf))
    assert ideal(0.0) == {"a": 8.0, "b": 8.0}
    assert ideal(1.0) == {"a": 0.0, "b": 0.0}
    rows = [ideal(s) for s in np.linspace(0, 1, 50)]
    assert all(more[name] >= less[name] for more, less in itertools.pairwise(rows) for name in "ab")
    assert ideal(0.45)["a"] > ideal(0.45)["b"]


# ------------------------------------------------------------------------------------------------------- latency


def watched(share: Any, calls: list[Mapping[str, int]]) -> Any:
    def stopwatch(widths: Mapping[str, int]) -> tuple[float, float]:
        calls.append(dict(widths))
        return 10.0, 10.0 * share(widths)

    return stopwatch


@pytest.mark.parametrize("text", ["60%", "6ms", "3.5ms"])
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_latency_is_met_closely_and_with_few_measurements(text: str, power: float) -> None:
    ladders = [ladder("a", 256, 1, 8), ladder("b", 512, 1, 8)]
    calls: list[Mapping[str, int]] = []
    share = lambda widths: 0.1 + 0.9 * (sum(widths.values()) / 768) ** power  # noqa: E731
    found = fitted_to_time(ladders, uniform(ladders), watched(share, calls), parse("latency", text))
    assert found.before == 10.0
    assert found.found == pytest.approx(10 * share(found.fit.widths))
    assert 0.9 * found.limit <= found.found <= found.limit
    assert all(width % 8 == 0 for width in found.fit.widths.values())
    assert len(calls) <= 14


def test_latency_out_of_reach_and_latency_already_there() -> None:
    ladders = [ladder("a", 64, 1, 8)]
    share = lambda widths: 0.5 + 0.5 * widths["a"] / 64  # noqa: E731
    assert not fitted_to_time(ladders, uniform(ladders), watched(share, []), parse("latency", "4ms")).fit.reached
    easy = fitted_to_time(ladders, uniform(ladders), watched(share, []), parse("latency", "12ms"))
    assert (easy.fit.reached, easy.fit.widths) == (True, {"a": 64})


def test_ends_of_a_schedule_are_all_and_as_few_as_possible() -> None:
    ladders = [ladder("a", 64, 1, 8)]
    assert rounded(ladders, uniform(ladders), 0.0) == {"a": 64}
    assert rounded(ladders, uniform(ladders), 1.0) == {"a": 8}
