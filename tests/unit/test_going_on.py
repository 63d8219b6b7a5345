"""Searches that go on past blocks which lose more than predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxgrail.allocation.found import Candidate, Found, Judged
from onnxgrail.report.notes import more
from onnxgrail.search.bisect import AGAIN, FILLED, Seek, farthest, farthest_of
from onnxgrail.search.harms import Harm
from onnxgrail.search.path import Path, Paths
from tests.unit.paths import NORMAL, harm, harms, never, product


@given(harms, st.sampled_from([1.0, 2.0]), st.integers(1, 16), st.sets(st.integers(0, 3)), st.floats(0, 0.3))
def test_a_path_goes_on_without_closed_blocks(
    blocks: list[Harm], power: float, count: int, closed: set[int], room: float
) -> None:
    paths = Paths(tuple(blocks), product, power, 10.0)
    path = paths.without()
    begun, names = path.steps[:count], {f"b{number}" for number in closed}
    longer = paths.within(begun[-1].loss + room, begun, names)
    assert longer.steps[: len(begun)] == begun
    before, costs = longer.widths(len(begun)), [longer.cost(n) for n in range(len(longer) + 1)]
    assert costs == sorted(costs, reverse=True)
    for step in longer.steps[len(begun) :]:
        assert step.block not in names
        assert step.loss <= begun[-1].loss + room + 1e-12
    now = longer.widths(len(longer))
    assert all(now[name] == before[name] for name in names & now.keys())
    alone = [dict(zip(h.levels, h.losses, strict=True)).get(now[h.block], 0.0) for h in blocks]
    assert abs(longer.loss(len(longer)) - sum(loss**power for loss in alone) ** (1 / power)) < 1e-9


def test_a_path_that_goes_on_takes_what_the_whole_path_takes() -> None:
    blocks = [harm(f"b{n}", 16, (12, 0.01 * (n + 1)), (8, 0.05 * (n + 1))) for n in range(3)]
    path = Paths(blocks, product, 1.0, 10.0).within(10.0)
    for count in range(1, len(path)):
        assert Paths(blocks, product, 1.0, 10.0).within(10.0, path.steps[:count]).steps == path.steps


def test_a_block_that_was_predicted_wrongly_stays_whole() -> None:
    """Two blocks are thought to lose next to nothing, but their smallest steps exceed the limit."""
    blocks = [harm(name, 8, (6, loss), (4, 2 * loss)) for name, loss in (("a", 0.001), ("b", 0.002), ("c", 0.02))]
    tried: list[Mapping[str, int]] = []

    def judged(path: Path, count: int) -> float:
        tried.append(path.widths(count))
        return 9.0 if min(tried[-1]["a"], tried[-1]["b"]) < 8 else path.loss(count)

    paths = Paths(tuple(blocks), product, 1.0, 1.0)
    path, best = farthest_of(paths, Seek(0.05, judged, never, NORMAL))
    assert path.widths(best) == {"a": 8, "b": 8, "c": 4}
    assert {"a": 8, "b": 6, "c": 8} in tried  # a path of the others begins with its smallest step
    assert len(tried) <= NORMAL.tries + 1 + 3
    path, best = farthest_of(paths, Seek(0.05, lambda path, _: 9.0 * len(path), never, NORMAL))
    assert (len(path), best) == (0, 0)  # nothing holds, and a path without steps is not judged


def test_blocks_that_lose_more_than_predicted_keep_their_widths_where_others_go_on() -> None:
    """The third block ends the path far below the limit from its second step on."""
    blocks = [harm(f"b{n}", 8, *((8 - k, (1 + n / 99) * k**2 / 2000) for k in range(1, 5))) for n in range(40)]
    paths, tried = Paths(tuple(blocks), lambda widths: float(sum(widths.values())), 1.0, 1.0), list[Path]()

    def judged(path: Path, count: int) -> float:
        tried.append(path)
        return path.loss(count) + (1.0 if path.widths(count)["b2"] < 7 else 0.0)

    path, best = farthest_of(paths, Seek(0.06, judged, never, NORMAL))
    widths = path.widths(best)
    assert widths.pop("b2") == 7
    assert sum(widths.values()) < 39 * 7 - 10
    assert FILLED * 0.06 < judged(path, best) <= 0.06
    assert len(tried) <= 1 + NORMAL.tries + 2 * AGAIN
    costs = [path.cost(n) for n in range(len(path) + 1)]
    assert costs == sorted(costs, reverse=True)
    assert path.steps[:best] == tuple(sorted(path.steps[:best], key=lambda step: -step.cost))


def test_the_first_candidate_that_holds_is_not_the_last_one() -> None:
    """The loss does not fall for as many candidates as there are tries."""
    levels = [(200 - n, 1e-4 * n) for n in range(1, 200)]
    paths = Paths((harm("a", 200, *levels),), product, 1.0, 1.0)
    tried: list[int] = []

    def judged(path: Path, count: int) -> float:
        tried.append(count)
        return 0.06 if count > 12 else 1e-3 * count

    path = paths.without()
    found = farthest(path, Seek(0.05, judged, never, NORMAL))
    first = next(place for place, count in enumerate(tried) if count <= 12)
    assert first >= NORMAL.tries - 1
    assert found.good == max(count for count in tried if count <= 12) > 2 * tried[first]
    assert len(tried) <= first + 1 + AGAIN


@pytest.mark.parametrize(
    ("means", "wanted"),
    [
        ((0.006, 0.002), "a model that saves 60% of macs, not 20%, has a loss of 0.60%, which may be up to 4.00%"),
        ((0.008, 0.002), "a model that saves 40% of macs, not 20%, has a loss of 0.20%, which may be up to 4.00%"),
        ((0.008, 0.008), "--max-loss 4% would save about 60% of macs, not 20%"),
    ],
)
def test_a_search_says_where_more_samples_may_allow_more(means: tuple[float, float], wanted: str) -> None:
    """The mean loss of a candidate is well within the limit, and only its bound is not."""

    def one(cost: float, mean: float, bound: float) -> Candidate:
        loss = Judged(output="y", part="", name="NMSE", kind="values", samples=80, mean=mean, bound=bound, agreement={})
        return Candidate(steps=1, cost=cost, predicted=0.0, loss=loss)

    tried = (one(4.0, means[0], 0.04), one(6.0, means[1], 0.04), one(8.0, 0.001, 0.005))
    found = Found(limit=0.01, minimize="macs", before=10.0, cost=8.0, crossed=False, tried=tried, chosen=2)
    note = more(replace(found, next_limit=0.04, next_cost=4.0))
    assert note.startswith(wanted)
    assert " of latency in float, not " in more(
        replace(found, minimize="latency", next_limit=0.04, next_cost=4.0), "int8"
    )
    assert note.endswith("on 80 samples: more samples may allow it") is (min(means) < 0.007)
