"""The order in which blocks are decided."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onnxgrail.core import Block, Kind
from onnxgrail.narrowing.order import WIDE, closed_steps, open_steps, turns
from tests.oracle import survey_of
from tests.tiny import feed, mlp


def block(first: int, last: int, kind: Kind = "mlp") -> Block:
    return Block(
        name=f"{kind}{first}-{last}",
        kind=kind,
        units=8,
        unit_size=1,
        slots=(),
        probes=(),
        ids=np.arange(1, 9),
        span=(first, last),
        nodes=(),
    )


def test_nothing_to_decide() -> None:
    assert closed_steps([]) == []
    assert open_steps([], lambda _: 1, 8) == []


def test_open_loop_is_one_step_where_its_statistics_fit() -> None:
    blocks = (block(4, 6), block(0, 2), block(0, 9, "stream"))
    (step,) = open_steps(blocks, lambda _: 5, 15)
    assert (step.blocks, step.limit) == (blocks, 0)


def test_open_loop_goes_through_the_network_where_they_do_not_fit() -> None:
    a, b, c, stream = block(0, 3), block(2, 5), block(4, 9), block(0, 9, "stream")
    found = open_steps([c, a, stream, b], lambda _: 5, 14)
    assert [(s.blocks, s.limit) for s in found] == [((stream, a), 0), ((b, c), 2)]
    found = open_steps([c, a, stream, b], lambda _: 5, 1)  # a block larger than the limit is a step of its own
    assert [(s.blocks, s.limit) for s in found] == [((stream,), 0), ((a,), 0), ((b,), 2), ((c,), 4)]


def test_closed_loop_goes_by_the_last_consumer() -> None:
    a, b, c = block(0, 3), block(2, 5), block(4, 9)
    found = closed_steps([c, a, b])
    assert [s.blocks for s in found] == [(a,), (b,), (c,)]
    assert [s.limit for s in found] == [0, 2, 4]


def test_the_limit_stays_in_front_of_every_later_block() -> None:
    """A gate that starts early and ends late holds the cut back for what is decided before it."""
    a, b, late = block(3, 4), block(5, 6), block(1, 9)
    assert [s.limit for s in closed_steps([a, b, late])] == [1, 1, 1]


def test_streams_and_what_spans_many_blocks_come_first_and_together() -> None:
    inner = [block(2 * k, 2 * k + 1) for k in range(1, WIDE + 2)]
    wide, stream = block(1, 99), block(5, 6, "stream")
    found = closed_steps([*inner, wide, stream])
    assert found[0].blocks == (wide, stream)
    assert found[0].limit == 0
    assert [s.blocks for s in found[1:]] == [(b,) for b in inner]
    near = block(1, 2 * WIDE + 1)  # spans WIDE others: near enough
    assert len(closed_steps([*inner[:WIDE], near])) == WIDE + 1


def test_blocks_of_a_real_graph() -> None:
    model = mlp(3)
    survey = survey_of(model, feed(model))
    found = closed_steps(survey.blocks)
    assert [[b.kind for b in s.blocks] for s in found] == [["stream"], ["mlp"], ["mlp"], ["mlp"]]
    limits = [s.limit for s in found]
    assert limits == sorted(limits)
    for step in found[1:]:
        assert step.limit <= step.blocks[0].span[0]


@dataclass(frozen=True)
class Layer:
    """Return the fitted layers."""

    span: tuple[int, int]


SPANS = st.tuples(st.integers(1, 30), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair)))


@given(st.lists(SPANS), st.lists(st.integers(1, 40), unique=True).map(sorted))
def test_turns(spans: list[tuple[int, int]], places: list[int]) -> None:
    """Layers in order, each after all blocks that begin before it, and nothing earlier than it must be."""
    blocks, layers = [block(*span) for span in spans], [Layer((place, place)) for place in places]
    found = turns(blocks, layers)
    assert [layer for turn in found for layer in turn.layers] == layers
    assert sorted(id(b) for turn in found for b in turn.blocks) == sorted(map(id, blocks))
    decided: list[Block] = []
    for number, turn in enumerate(found):
        later = [b for other in found[number + 1 :] for b in other.blocks]
        decided += turn.blocks
        for layer in turn.layers:
            assert all(b.span[0] > layer.span[1] for b in later)
        if turn.layers and number:
            assert all(b.span[0] <= turn.layers[0].span[1] for b in turn.blocks)
        begins = [x.span[0] for other in found[number + 1 :] for x in (*other.blocks, *other.layers)]
        assert turn.limit == min(begins, default=0)
