"""A size is met by widths and bits together, or by bits before widths: both are tried where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from onnxgrail.allocation.choose import allocate, with_names
from onnxgrail.allocation.few import Bits, Moved, Rung, fewest, held, lowered, raised, rungs_of, with_bits
from onnxgrail.allocation.ladders import Widths
from onnxgrail.allocation.losses import Search, Ways, search_of
from onnxgrail.allocation.measures import built, measure_of
from onnxgrail.calibration.prepare import prepare
from onnxgrail.core import Recipe
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.bits.measuring import measuring
from onnxgrail.narrowing.searching import narrow_of
from tests.e2e import nets
from tests.e2e.rounded import ROWS

SHARE = 0.24


@pytest.fixture(scope="module")
def search() -> Search:
    """Return the search of a network that bits alone bring to the size."""
    job = Job(recipe=Recipe(target_size=f"{SHARE:%}"))
    prepared = prepare(nets.mlp((24, 192, 128, 10)), {"x": ROWS[:256]}, job, held_out=64)
    blocks = prepared.survey.blocks
    found = search_of(prepared, job, blocks, narrow=narrow_of(job.recipe))
    return measuring(replace(found, rungs=rungs_of(prepared, job.recipe)[0]))


def test_the_second_way_lowers_bits_before_widths(search: Search) -> None:
    assert search.together is not None
    measure, numbers = with_names(search, measure_of(search.prepared, "size"))[1], set()
    full = {block.name: block.units for block in search.blocks}
    every = fewest(search.rungs)
    for share in (0.1, 0.16, 0.2, 0.24, 0.4, 0.9):
        limit = share * measure.given
        ways = search.together(measure, 0.1, limit).found
        numbers.add((len(ways), ways[-1][1] is None))
        assert ways[0][1] is not None
        for bits, ideal in ways[1:]:
            assert (ideal is None) == (with_bits(measure, search.rungs, every)(full) <= limit)
            assert bits == every or with_bits(measure, search.rungs, bits)(full) <= limit
    assert numbers == {(1, False), (2, False), (2, True)}


@pytest.mark.parametrize("best", [0, 1])
def test_the_way_that_loses_least_is_taken(search: Search, best: int) -> None:
    full = {block.name: block.units for block in search.blocks}
    every = fewest(search.rungs)
    few: Bits = {rung.weight: max(rung.forms) for rung in search.rungs}
    seen: list[Sequence[tuple[Widths, Bits]]] = []

    def least(candidates: Sequence[tuple[Widths, Bits]]) -> int:
        seen.append(candidates)
        return best

    def half(share: float) -> dict[str, float]:
        return {name: units * (1 - share) for name, units in full.items()}

    ways = Ways([(few, half), (every, None)], least)
    found = allocate(replace(search, together=lambda *_: ways))
    ((widths, bits), (whole, fewer)) = seen[0]
    assert whole == full
    assert sum(widths.values()) < sum(full.values())
    assert min(fewer.values()) < min(bits.values())
    assert found.widths == (widths, full)[best]
    assert found.bits == (bits, fewer)[best]
    assert found.budget is not None
    assert found.budget.found <= found.budget.limit


@pytest.mark.parametrize(("moved", "given", "left"), [(lowered, 8, [4, 8, 8]), (raised, 4, [4, 8, 8])])
def test_a_file_a_little_larger_than_counted_costs_little(moved: Moved, given: int, left: list[int]) -> None:
    """Before, all weights got the fewest bits then: a fifth of the file where two fifths were asked for."""
    forms: Any = {8: None, 4: None}
    rungs = [Rung(name, (8, 8), 256, forms) for name in "abc"]
    bits: Bits = {rung.weight: given for rung in rungs}

    def counted(bits: Bits) -> float:
        return 100.0 * sum(bits.values())

    def size(bits: Bits) -> float:
        return counted(bits) + 40 * sum(number == 8 for number in bits.values())

    limit = counted(dict.fromkeys("abc", 8)) + 110  # 10 bytes too few for all
    found = held(limit, counted, partial(moved, rungs, bits), size)
    assert found is not None
    assert sorted(found.values()) == left
    assert size(found) <= limit


def test_bits_that_are_a_few_bytes_too_large_are_lowered_a_little(search: Search) -> None:
    full = {block.name: block.units for block in search.blocks}
    eight: Bits = {rung.weight: 8 for rung in search.rungs}
    real = built(search.prepared, search.job, "size", full, eight)
    assert real is not None
    job = replace(search.job, recipe=replace(search.recipe, target_size=int(real) - 10))
    found = allocate(replace(search, job=job, together=lambda *_: Ways([(eight, None)], lambda _: 0)))
    assert list(found.bits.values()).count(4) == 1
    assert found.budget is not None
    assert found.budget.found <= real - 10


def test_a_measured_loss_decides(search: Search) -> None:
    """Blocks at a tenth of their width lose more than weights of 8 bits, whichever comes first."""
    full = {block.name: block.units for block in search.blocks}
    tenth, eight = {name: units // 10 for name, units in full.items()}, {rung.weight: 8 for rung in search.rungs}
    assert search.together is not None
    measure = measure_of(search.prepared, "size")
    ways = search.together(measure, 0.1, SHARE * measure.given)
    assert ways.least([(tenth, eight), (full, eight)]) == 1
    assert ways.least([(full, eight), (tenth, eight)]) == 0


def test_a_way_that_does_not_reach_the_size_is_not_tried(search: Search) -> None:
    few: Bits = {rung.weight: max(rung.forms) for rung in search.rungs}
    small = replace(search, job=Job(recipe=Recipe(target_size="9%")))

    def never(_: Sequence[tuple[Widths, Bits]]) -> int:
        raise AssertionError("a single way needs no trial")

    def narrower(share: float) -> dict[str, float]:
        return {block.name: block.units * (1 - share) for block in search.blocks}

    found = allocate(replace(small, together=lambda *_: Ways([(few, narrower), (few, None)], never)))
    assert any(found.widths[block.name] < block.units for block in search.blocks)
