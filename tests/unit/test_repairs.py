"""Repairs of the losses of single blocks by later fits: measured for a few blocks, interpolated for the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxgrail.core import Block, Kind
from onnxgrail.search import trials
from onnxgrail.search.harms import Harm, Near
from onnxgrail.search.path import Paths
from onnxgrail.search.repairs import LEAST, Plan, dealt, repaired, runs_alongside

LEVELS = (28, 24, 20, 16, 12, 8)
ERRORS = tuple(float(((32 - level) / 32) ** 2) for level in LEVELS)


def harm(name: str, scale: float = 0.1) -> Harm:
    """Return a block whose loss is proportional to the error of its consumers."""
    return Harm(name, 32, "values", LEVELS, tuple(scale * error for error in ERRORS), ERRORS)


def test_shares_of_a_few_blocks_are_interpolated_over_the_depth() -> None:
    harms = [harm(f"b{n}") for n in range(5)]
    shares, asked = {"b0": 0.01, "b2": 0.1, "b4": 1.0}, []

    def left(block: str, width: int) -> float:
        asked.append((block, width))
        return shares[block]

    found = repaired(harms, Plan(3), 1.0, Near(limit=0.02), left)
    assert [block for block, _ in asked] == list(shares)
    assert {width for _, width in asked} == {16}  # half of the units, with a loss near the limit
    rates = [after.losses[3] / before.losses[3] for after, before in zip(found, harms, strict=True)]
    assert rates == pytest.approx([0.01, 0.01**0.75, 0.1, 0.1**0.5, 1.0])


def test_the_more_is_repaired_the_more_losses_follow_the_errors_of_the_consumers() -> None:
    measured = np.array([0.001, 0.002, 0.004, 0.01, 0.4, 0.9])
    steep = Harm("b", 32, "classes", LEVELS, tuple(measured.tolist()), ERRORS)
    followed = np.sqrt(np.array(ERRORS) / ERRORS[3])
    for share in (1.0, 0.5, 0.01):
        (found,) = repaired([steep], Plan(1), 2.0, Near(limit=0.01), lambda *_, share=share: share)
        wanted = share * 0.01 * (measured / 0.01) ** share * followed ** (1 - share)
        np.testing.assert_allclose(found.losses, wanted)


def test_a_share_is_never_above_one_or_nothing() -> None:
    for share, expected in ((3.0, 1.0), (0.0, LEAST)):
        (found,) = repaired([harm("b")], Plan(1), 1.0, Near(limit=0.02), lambda *_, share=share: share)
        assert found.losses[3] == pytest.approx(expected * harm("b").losses[3])


def test_blocks_without_harm_or_levels_stay_as_they_are() -> None:
    nothing = [Harm("a", 1, "", (), (), ()), Harm("b", 32, "values", LEVELS, (0.0,) * 6, (0.0,) * 6)]
    assert repaired(nothing, Plan(4), 1.0, Near(limit=0.02), lambda *_: pytest.fail("tried")) == nothing
    assert repaired([harm("a")], Plan(0), 1.0, Near(limit=0.02), lambda *_: pytest.fail("tried")) == [harm("a")]


def test_a_search_takes_more_of_blocks_whose_losses_later_fits_repair() -> None:
    harms = [harm("early"), harm("late")]

    def narrowed(blocks: list[Harm]) -> dict[str, int]:
        path = Paths(blocks, lambda widths: float(sum(widths.values())), 1.0, 0.02).within(0.02)
        return path.widths(len(path))

    found = repaired(harms, Plan(2), 1.0, Near(limit=0.02), lambda block, _: {"early": 0.1, "late": 1.0}[block])
    assert narrowed(found)["early"] < narrowed(found)["late"]


def test_a_block_beside_all_others_says_nothing_about_them() -> None:
    harms = [harm("early"), harm("late"), harm("stream")]
    shares = {"early": 0.1, "late": 1.0, "stream": 0.02}
    found = repaired(harms, Plan(3, frozenset({"stream"})), 1.0, Near(limit=0.02), lambda block, _: shares[block])
    apart = repaired(harms[:2], Plan(2), 1.0, Near(limit=0.02), lambda block, _: shares[block])
    assert found[:2] == apart
    assert max(found[2].losses) < max(found[0].losses)


def test_shares_are_interpolated_among_blocks_that_are_alike() -> None:
    names = ["a.conv", "a.rank", "b.conv", "b.rank", "c.conv", "c.rank"]
    shares = {"a.conv": 0.01, "c.conv": 1.0, "a.rank": 0.5, "c.rank": 0.5}
    like = {name: "rank" for name in names if name.endswith("rank")}
    found = repaired([harm(name) for name in names], Plan(4, like=like), 1.0, Near(limit=0.02), lambda b, _: shares[b])
    rates = [after.losses[3] / harm("").losses[3] for after in found]
    assert rates == pytest.approx([0.01, 0.5, 0.1, 0.5, 1.0, 0.5])


@pytest.mark.parametrize(
    ("count", "sizes", "expected"),
    [
        (6, [6, 6], [3, 3]),
        (6, [9, 3], [5, 1]),
        (3, [1, 50, 1], [1, 1, 1]),
        (6, [2, 1], [2, 1]),
        (1, [1, 5], [0, 1]),
        (2, [], []),
    ],
)
def test_tries_are_dealt_to_groups_by_their_sizes(count: int, sizes: list[int], expected: list[int]) -> None:
    assert dealt(count, sizes) == expected


@pytest.mark.parametrize(
    ("kind", "span", "ranked", "alongside"),
    [
        ("stream", (0, 90), "s", True),
        ("stream", (40, 60), "s", False),
        ("stream", (0, 90), "", False),
        ("rank", (40, 42), "w", False),
        ("embedding", (0, 2), "t", True),
    ],
)
def test_only_a_long_stream_runs_alongside_other_blocks(
    kind: Kind, span: tuple[int, int], ranked: str, alongside: bool
) -> None:
    block = Block(
        name="b",
        kind=kind,
        units=2,
        unit_size=1,
        slots=(),
        probes=(),
        ids=np.arange(2),
        span=span,
        nodes=(),
        ranked=ranked,
    )
    assert runs_alongside(block, 100) is alongside


@pytest.mark.parametrize(("near", "expected"), [(Near(limit=0.01), 6), (Near(share=0.3), 12)])
def test_for_a_target_each_sort_is_tried_in_full(near: Near, expected: int) -> None:
    blocks = [SimpleNamespace(name=f"b{n}", kind=kind) for n, kind in enumerate(("conv", "rank", "stream"))]
    task: Any = SimpleNamespace(near=near, search=SimpleNamespace(blocks=blocks))
    parts: Any = SimpleNamespace(trials=6)
    assert trials.tries(task, parts) == expected
