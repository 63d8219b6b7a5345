"""Rounding: as coarse as `--round-to` asks where that takes no more of a block than it should, and the total is met."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxgrail.allocation.balance import PROMISE, balanced, by_units
from onnxgrail.allocation.ladders import MOST, Ladder, ladder
from onnxgrail.allocation.schedules import uniform

from .test_plan import block


def chain(ladders: list[Ladder]) -> Any:
    """Parameters of a chain of layers: each weight is cut by the blocks on both of its sides."""

    def cost(widths: Mapping[str, int]) -> float:
        row = [3, *(widths[one.name] for one in ladders), 10]
        return float(sum(9 * a * b for a, b in itertools.pairwise(row)))

    return cost


def taken(ladders: list[Ladder], share: float) -> tuple[dict[str, int], dict[str, float], float]:
    """Widths, what each block was asked to lose, and the share that goes, when a share of a chain is to go."""
    cost = chain(ladders)
    full = cost({one.name: one.units for one in ladders})
    fit = balanced(ladders, uniform(ladders), cost, (1 - share) * full, strict=False)
    return fit.widths, {one.name: one.units - fit.ideal[one.name] for one in ladders}, 1 - cost(fit.widths) / full


@pytest.mark.parametrize("units", [(16, 16, 16), (16, 32, 64), (48,) * 5, (16, 24, 40, 80, 112, 192), (64,), (24, 8)])
@pytest.mark.parametrize("share", [0.2, 0.3, 0.5])
def test_the_total_is_met_and_no_block_loses_much_more_than_it_was_asked_to(
    units: tuple[int, ...], share: float
) -> None:
    ladders = [ladder(str(n), u, 1, 8) for n, u in enumerate(units)]
    widths, asked, gone = taken(ladders, share)
    assert abs(gone - share) < 0.025
    for one in ladders:
        assert one.units - widths[one.name] <= MOST * asked[one.name] + 1e-6


@given(
    st.lists(st.tuples(st.integers(2, 300), st.sampled_from([1, 2, 64])), min_size=1, max_size=8),
    st.floats(0.02, 0.9),
    st.sampled_from([1, 8, 16]),
)
def test_beyond_a_quarter_more_only_where_single_units_are_too_coarse(
    rows: list[tuple[int, int]], share: float, round_to: int
) -> None:
    ladders = [ladder(str(n), units, size, round_to) for n, (units, size) in enumerate(rows)]
    widths, asked, _ = taken(ladders, share)
    beyond = [one for one in ladders if one.units - widths[one.name] > MOST * asked[one.name] + 1e-6]
    if not beyond:
        return
    most = {one.name: max(1, math.ceil(one.units - MOST * asked[one.name] - 1e-9)) for one in ladders}
    cost = chain(ladders)
    full = cost({one.name: one.units for one in ladders})
    assert cost(most) > (1 + PROMISE) * (1 - share) * full  # all blocks at their bound do not do


def test_wide_blocks_keep_multiples() -> None:
    ladders = [ladder(str(n), units, 1, 8) for n, units in enumerate([64, 128, 256, 512] * 6)]
    widths, _, gone = taken(ladders, 0.3)
    assert sum(width % 8 != 0 for width in widths.values()) <= 6  # of 24; a few of the 64 are asked for 10 each
    assert gone == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize(
    ("units", "size", "share", "round_to", "kept"),
    [
        (64, 1, 0.0, 8, 64),
        (100, 1, 0.0, 8, 100),  # nothing changes, whatever the multiple
        (64, 1, 0.3, 1, 45),  # 0.3 x 64 = 19.2 go
        (10, 1, 0.25, 1, 7),  # 2.5 go: half is rounded up
        (16, 1, 0.3, 8, 11),  # 8 would be 1.7 times as much as was asked for, 12 less than that
        (64, 1, 0.5, 8, 32),
        (100, 1, 0.05, 8, 95),
        (16, 1, 0.5, 8, 8),
        (12, 64, 0.3, 8, 8),  # heads of 64 features are multiples already: 3.6 go, rounded
        (2, 64, 0.3, 8, 2),  # one of two heads is more than half as much again as was asked for
        (2, 64, 0.5, 8, 1),
        (5, 1, 0.3, 1, 4),  # 1.5 go, and 2 would be a third more
        (7, 1, 0.99, 1, 1),
    ],
)
def test_one_block_loses_a_share_of_its_units(units: int, size: int, share: float, round_to: int, kept: int) -> None:
    assert by_units([block("a", units=units, size=size)], share, round_to) == {"a": kept}


def test_blocks_lose_a_share_of_their_units_together() -> None:
    """Each is rounded down or up to a multiple, so that 30 % of all units go and not a quarter or more of each."""
    widths = by_units([block(str(n), units=64) for n in range(10)], 0.3, 8)
    assert set(widths.values()) == {40, 48}
    assert sum(widths.values()) == 448
    narrow = by_units([block("a", units=16), block("b", units=16), block("c", units=48)], 0.3, 8)
    assert narrow == {"a": 12, "b": 12, "c": 32}


@given(st.lists(st.integers(2, 300), min_size=1, max_size=6), st.floats(0.01, 0.95), st.sampled_from([1, 8]))
def test_a_share_of_units_is_near_what_was_asked_for(units: list[int], share: float, round_to: int) -> None:
    widths = by_units([block(str(n), units=u) for n, u in enumerate(units)], share, round_to)
    for number, whole in enumerate(units):
        gone = whole - widths[str(number)]
        if round_to == 1:
            assert abs(gone - share * whole) <= 1
            assert gone <= MOST * share * whole + 1e-6
        assert 1 <= widths[str(number)] <= whole
    if round_to == 8:
        coarse = 0.25 * sum(units) * share if min(units) < 16 else 0.0
        assert abs(sum(widths.values()) - (1 - share) * sum(units)) <= max(8, coarse) + 1
