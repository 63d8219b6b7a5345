"""The search for widths within a loss: losses of blocks, nested paths, and how far along them a model may go."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from onnxgrail.algebra.moments.curves import Narrow
from onnxgrail.allocation.found import Candidate, Found, Judged, found_of
from onnxgrail.allocation.ladders import Ladder
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.core import Block, Change, Floats, Reducer, View
from onnxgrail.report.notes import little
from onnxgrail.search import trials
from onnxgrail.search.bisect import Seek, _little, cheaper, farthest
from onnxgrail.search.harms import Harm, Near, harm_of, levels_of, power_of
from onnxgrail.search.path import Path, Paths, Step
from onnxgrail.search.within import further
from tests.tiny import tiny
from tests.unit.paths import NORMAL, harm, harms, never, product

ROUNDED = [2.220446049250313e-16, 2.9500666638939865e-27, 2.9500666638939865e-27, 0.0]
TINY = [Harm(f"b{n}", 16, "values", (13,), (loss,), (loss,)) for n, loss in enumerate(ROUNDED)]


@example(TINY, 1.0)  # sums of these round downwards
@given(harms, st.sampled_from([1.0, 2.0]))
def test_paths_are_nested_and_costs_and_losses_are_those_of_their_widths(blocks: list[Harm], power: float) -> None:
    path = Paths(blocks, product, power, 10.0).within(10.0)
    for count in range(len(path)):
        wide, narrow = path.widths(count), path.widths(count + 1)
        assert all(narrow[name] <= wide[name] for name in wide)
        assert sum(narrow[name] < wide[name] for name in wide) == 1
        assert path.cost(count + 1) == product(narrow) < path.cost(count)
        alone = [dict(zip(h.levels, h.losses, strict=True)).get(narrow[h.block], 0.0) for h in blocks]
        assert path.loss(count + 1) == pytest.approx(sum(loss**power for loss in alone) ** (1 / power))
        assert path.loss(count + 1) >= path.loss(count)
    assert path.widths(0) == {h.block: h.units for h in blocks}
    assert all(path.widths(len(path))[h.block] == min(h.levels) for h in blocks)


def test_every_step_is_the_one_of_least_harm_per_saved_cost() -> None:
    """The naive search over all blocks and levels takes the same steps."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows = np.sort(rng.random((4, 4)), axis=1).cumsum(axis=1).tolist()
        blocks = [harm(f"b{n}", 16, *zip((14, 12, 10, 8), row, strict=True)) for n, row in enumerate(rows)]
        prices = rng.random(4) + 0.1

        def cost(widths: Mapping[str, int], prices: Floats = prices) -> float:
            return float(prices @ list(widths.values()))

        path = Paths(blocks, cost, 1.0, 100.0).within(100.0)
        for count in range(len(path)):
            before, after = path.widths(count), path.widths(count + 1)
            rates = {}
            for h in blocks:
                losses = {h.units: 0.0, **dict(zip(h.levels, h.losses, strict=True))}
                for width in (w for w in h.levels if w < before[h.block]):
                    saved = cost(before) - cost({**before, h.block: width})
                    rates[h.block, width] = (losses[width] - losses[before[h.block]]) / saved
            (block,) = [name for name in before if after[name] < before[name]]
            assert rates[block, after[block]] == pytest.approx(min(rates.values()))


def test_a_step_that_saves_next_to_nothing_is_not_taken() -> None:
    """A fitted latency tells 63 channels from 64, which the kernels compute alike."""
    path = Paths(
        (harm("a", 64, (63, 0.0), (48, 0.01)),), lambda widths: 1e6 - (-widths["a"] // 16) * 1e3, 1.0, 1.0
    ).within(1.0)
    assert [step.width for step in path.steps] == [48]
    tiny = Paths((harm("a", 64, (63, 0.0)),), lambda widths: 1e6 + widths["a"], 1.0, 1.0).within(1.0)
    assert not tiny.steps


def test_a_path_ends_at_the_loss_that_is_given() -> None:
    path = Paths((harm("a", 8, (6, 0.01), (4, 0.02), (2, 0.5)),), product, 1.0, 0.1).within(0.1)
    assert path.widths(len(path)) == {"a": 4}
    assert path.reach(0.015) == 1
    assert path.reach(0.0) == 0
    beyond = Paths((harm("a", 8, (6, 0.3), (4, 0.5)),), product, 1.0, 0.1).without()
    assert beyond.widths(len(beyond)) == {"a": 6}  # the smallest step, whose loss may be predicted wrongly


def steps(losses: list[float]) -> Path:
    found = tuple(Step("b", 1000 - n, loss, 1000.0 - n) for n, loss in enumerate(losses, start=1))
    return Path({"b": 1000}, 1000.0, found)


@given(
    st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=60).map(sorted),
    st.floats(0.05, 20.0),
    st.floats(0.3, 2.5),
    st.floats(1e-3, 0.5),
)
def test_what_is_chosen_holds_and_few_candidates_are_tried(
    losses: list[float], factor: float, power: float, limit: float
) -> None:
    path, tried = steps(losses), []

    def judged(path: Path, count: int) -> float:
        tried.append(count)
        return float(factor * path.loss(count) ** power)

    best = farthest(path, Seek(limit, judged, never, NORMAL)).good
    assert len(tried) == len(set(tried)) <= NORMAL.tries + 1
    assert best == 0 or factor * path.loss(best) ** power <= limit
    if best == 0:
        assert factor * path.loss(1) ** power > limit


def test_the_search_ends_where_little_is_left() -> None:
    """Less than half a percent of the cost, and than two percent of what is saved."""
    path = steps(np.geomspace(1e-4, 0.3, 950).tolist())
    assert _little(path, 900, 904)
    assert not _little(path, 900, 906)
    assert _little(path, 100, 101)
    assert not _little(path, 100, 103)


def test_a_smooth_loss_is_met_closely() -> None:
    path = steps(np.geomspace(1e-4, 0.3, 200).tolist())
    for factor in (0.2, 0.3, 1.0, 4.0, 30.0):

        def judged(path: Path, count: int, factor: float = factor) -> float:
            return float(factor * path.loss(count) ** 1.3)

        best = farthest(path, Seek(0.02, judged, never, NORMAL)).good
        assert NORMAL.close * 0.02 <= factor * path.loss(best) ** 1.3 <= 0.02


@pytest.mark.parametrize("jump", [8, 12, 20, 31, 50])
def test_a_loss_that_jumps_does_not_end_at_the_first_step(jump: int) -> None:
    path = steps([0.001 * n for n in range(1, 65)])

    def judged(path: Path, count: int) -> float:
        return path.loss(count) if count <= jump else 0.051 + path.loss(count) / 100

    best = farthest(path, Seek(0.05, judged, never, NORMAL)).good
    assert jump / 3 <= best <= jump


def test_a_loss_that_saturates_is_followed_to_its_limit() -> None:
    """Far beyond the limit it says little of where it holds: measured on the embedded ResNet, total variation."""
    numbers = [1, 24, 39, 46, 47, 48, 49, 52, 56]
    predicted = np.log([1e-4, 0.0048, 0.0153, 0.0336, 0.0381, 0.0504, 0.0723, 0.1577, 0.7137])
    measured = np.log([2e-4, 0.0094, 0.0476, 0.2217, 0.3561, 0.3894, 0.4388, 0.5618, 0.8])
    path = steps(np.exp(np.interp(range(1, 57), numbers, predicted)).tolist())
    best = farthest(path, Seek(0.3, lambda _, n: float(np.exp(np.interp(n, numbers, measured))), never, NORMAL)).good
    assert best in (45, 46)


def test_a_loss_of_which_most_is_there_from_the_start_is_followed() -> None:
    """Bits lose the same at all widths; in proportion to its prediction such a loss would be reached in small steps."""
    path, tried = steps(np.linspace(0.0001, 0.004, 200).tolist()), []

    def judged(path: Path, count: int) -> float:
        tried.append(count)
        return 0.007 + path.loss(count)

    best = farthest(path, Seek(0.01, judged, never, NORMAL), first=10).good
    assert 0.0088 <= 0.007 + path.loss(best) <= 0.01
    assert len(tried) <= 4


def test_a_search_stops_when_time_is_over() -> None:
    path = steps(np.linspace(0.001, 0.1, 100).tolist())
    tried: list[int] = []

    def judged(path: Path, count: int) -> float:
        tried.append(count)
        return 0.2 * path.loss(count)

    best = farthest(path, Seek(0.05, judged, lambda: True, NORMAL)).good
    assert tried == [best]


@pytest.mark.parametrize(("limit", "other"), [(0.05, False), (0.2, True), (0.9, True)])
def test_another_path_is_followed_if_it_holds_where_its_cost_gets_less(limit: float, other: bool) -> None:
    first, second = steps([0.001 * n for n in range(1, 101)]), steps([0.002 * n for n in range(1, 201)])
    tried: list[int] = []

    def judged(path: Path, count: int) -> float:
        assert path is second
        tried.append(count)
        return path.loss(count) * 0.9

    seek = Seek(limit, judged, never, NORMAL)
    path, best = cheaper((first, 60), second, seek)
    assert tried[0] == 61  # the first one that costs less
    assert path is (second if other else first)
    assert best == 60 if not other else path.cost(best) < first.cost(60) and judged(path, best) <= limit
    assert other or len(tried) == 1
    assert cheaper((first, 60), steps([0.1] * 60), seek) == (first, 60)


def view() -> View:
    block = Block(
        name="b", kind="mlp", units=64, unit_size=1, slots=(), probes=(), ids=np.arange(64), span=(0, 1), nodes=()
    )
    return View(block=block, weights=(), stats=())


def narrow(error: Callable[[int], float]) -> Narrow:
    def change(view: View, width: int) -> Change:
        return Change(block=view.block, reducer=Reducer(kept=np.arange(width)))

    return Narrow(change, lambda _, width: error(width))


def gone(width: int) -> float:
    return ((64 - width) / 64) ** 2


@pytest.mark.parametrize(("kind", "power"), [("classes", 2.0), ("scores", 2.0), ("values", 1.0), ("tokens", 1.0)])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 3.0])
def test_losses_between_trials_follow_the_errors_of_the_consumers(kind: str, power: float, scale: float) -> None:
    def loss(width: int) -> float:
        return min(1.0, scale * ((64 - width) / 64) ** (2 / power))

    tried = []

    def trial(change: Change) -> tuple[float, str]:
        tried.append(len(change.reducer.kept))
        return loss(tried[-1]), kind

    found = harm_of(view(), Ladder("b", 64, 8), narrow(gone), trial, Near(limit=0.02), float)
    assert found.levels == levels_of(Ladder("b", 64, 8))
    assert 1 <= len(tried) <= 3
    np.testing.assert_allclose(found.losses, [loss(width) for width in found.levels], rtol=1e-6)
    assert power_of([found]) == power


def test_blocks_whose_error_is_zero_cost_nothing() -> None:
    found = harm_of(
        view(),
        Ladder("b", 64, 1),
        narrow(lambda width: 0.0 if width >= 32 else 0.5),
        lambda c: (0.0 if len(c.reducer.kept) >= 32 else 0.2, ""),
        Near(limit=0.02),
        float,
    )
    assert all(loss == 0 for width, loss in zip(found.levels, found.losses, strict=True) if width >= 32)
    assert found.losses[-1] > 0


def judged(bound: float) -> Judged:
    return Judged(
        output="y", part="", name="NMSE", kind="values", samples=9, mean=bound / 2, bound=bound, agreement={"value": 1}
    )


def test_a_found_search_survives_plain_data() -> None:
    one = Candidate(steps=3, cost=5.0, predicted=0.1, loss=judged(0.2))
    found = Found(
        limit=0.2, minimize="macs", before=9.0, cost=5.0, crossed=True, tried=(one,), chosen=0, cheapest=("b", 3, 4)
    )
    assert found_of(json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize(
    ("cost", "minimize", "kind", "options"),
    [
        (8.95, "latency", "none", "--minimize size or --quantize int8"),
        (8.95, "size", "none", "--quantize int8"),
        (8.95, "latency", "int8", "--minimize size"),
        (8.95, "size", "int8", None),
        (8.9, "latency", "none", ""),
    ],
)
def test_a_search_that_saves_little_says_so(cost: float, minimize: str, kind: str, options: str | None) -> None:
    one = Candidate(steps=1, cost=cost, predicted=0.0, loss=judged(0.0))
    found = Found(limit=0.01, minimize=minimize, before=9.0, cost=cost, crossed=False, tried=(one,), chosen=0)
    told = f"less than 1% of {minimize} goes within --max-loss 1%"
    more = f"; fewer bits may lose less than fewer units: {options}" if options else ""
    assert little(found, kind) == ("" if options == "" else told + more)


@pytest.mark.parametrize(("near", "wanted"), [(Near(share=0.25), [48, 24]), (Near(share=0.5), [32, 16])])
def test_near_a_share_a_block_is_tried_there_and_with_half_of_the_width(near: Near, wanted: list[int]) -> None:
    tried: list[int] = []

    def trial(change: Change) -> tuple[float, str]:
        tried.append(len(change.reducer.kept))
        return 0.1, ""

    harm_of(view(), Ladder("b", 64, 8), narrow(gone), trial, near, float)
    assert tried == wanted


@pytest.mark.parametrize(("loss", "wanted"), [(0.1, [48]), (0.001, [48, 32, 16])])
def test_a_width_is_tried_only_if_it_costs_less_than_wider_ones(loss: float, wanted: list[int]) -> None:
    """Kernels compute whole blocks of 16 channels, and 40 take even longer than 64."""

    def cost(width: int) -> float:
        return 70.0 if width == 40 else -(-width // 16) * 16.0

    tried: list[int] = []

    def trial(change: Change) -> tuple[float, str]:
        tried.append(len(change.reducer.kept))
        return loss, "values"

    found = harm_of(view(), Ladder("b", 64, 8), narrow(gone), trial, Near(limit=0.02), cost)
    assert tried == wanted
    assert found.levels == levels_of(Ladder("b", 64, 8))  # others have a loss, too: beside narrower blocks they may pay
    tried.clear()
    harm_of(view(), Ladder("b", 64, 8), narrow(gone), trial, Near(limit=0.02), lambda width: 64.0)
    assert tried[0] == 56


@pytest.mark.parametrize(
    ("macs", "side", "samples"),
    [(1e6, 1, 20), (1e9, 1, 8), (5.1e9, 1, 4), (1e12, 1, 2), (1e6, 1000, 8), (1e6, 2259, 4), (1e9, 2025, 4)],
)
def test_trials_of_a_heavy_model_or_with_large_outputs_have_fewer_samples(
    macs: float, side: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials.counting, "macs", lambda *_: int(macs))
    batches = Batches(feeds=tuple(dict for _ in range(20)), samples=20, source="test")
    model = tiny("float[1,N] x => float[1,N] y", "y = Relu(x)", {})
    survey = SimpleNamespace(facts=SimpleNamespace(shapes={"y": (1, side, side)}))
    prepared: Any = SimpleNamespace(batches=batches, model=model, survey=survey, samples=1)
    assert len(trials._some(prepared, 33, Near(limit=0.01), lambda: np.ones(20))) == samples


@pytest.mark.parametrize(
    ("bounds", "told"),
    [
        ({1: 0.004}, (0.02, 80.0)),  # predicted: nothing beyond was measured
        ({1: 0.004, 2: 0.0171, 3: 0.0264}, (0.027, 70.0)),  # the lowest cost
        ({1: 0.004, 2: 0.0171, 3: 0.5}, (0.018, 80.0)),  # a loss that is far larger is no advice
    ],
)
def test_what_a_larger_loss_allows(bounds: dict[int, float], told: tuple[float, float]) -> None:
    path = Path({"b": 10}, 100.0, tuple(Step("b", 10 - n, 0.005 * n, 100.0 - 10 * n) for n in (1, 2, 3)))
    tried = [
        Candidate(steps=n, cost=path.cost(n), predicted=path.loss(n), loss=judged(bound)) for n, bound in bounds.items()
    ]
    assert further(path, tried, 1, 0.01) == pytest.approx(told)
