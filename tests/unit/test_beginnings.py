"""Fits and judgments of candidates begin at a cut, to which the original model is run once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest

from onnxgrail.calibration.feeds.judging import part_of
from onnxgrail.calibration.judge import Judge
from onnxgrail.calibration.prepared import Prepared, narrowed
from onnxgrail.calibration.stream.beginnings import Beginnings
from onnxgrail.calibration.stream.cache import Beginning
from onnxgrail.calibration.streaming import stream_of
from onnxgrail.graph.cuts.reach import first_change
from onnxgrail.graph.rewrite import weights
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.choosing import Run
from onnxgrail.narrowing.grail import settle
from onnxgrail.search.begun import recorded
from tests.unit.test_shared_runs import RECIPE, halved, of_convolutions, of_early_outputs, of_mlps

MUCH = 2**30


def beginnings(prepared: Prepared, room: int = MUCH) -> Beginnings:
    return Beginnings(prepared, RECIPE.providers, room)


def last_of(prepared: Prepared) -> tuple[Ledger, int]:
    """The ledger without half of the last block, and the position of the first node that it changes."""
    ledger = halved(prepared, max(prepared.survey.blocks, key=lambda block: block.span[0]))
    return ledger, first_change(prepared.model.graph, prepared.survey, ledger)


@pytest.mark.parametrize("make", [of_mlps, of_convolutions, of_early_outputs])
def test_candidates_that_begin_at_a_cut_lose_what_the_whole_model_loses(make: Callable[[], Prepared]) -> None:
    prepared = make()
    ledger, first = last_of(prepared)
    place = beginnings(prepared).before(prepared.batches, first)
    assert place is not None
    assert 0 < place.position <= first
    every = range(len(prepared.batches))
    with (
        Judge(prepared.model, prepared.batches, RECIPE.providers) as judge,
        stream_of(prepared, RECIPE, beginning=place) as stream,
    ):
        tail = judge.loss_of([nullcontext(recorded(prepared, judge, stream, ledger, every))], every)
        whole = judge.loss((narrowed(prepared, ledger), every))
    assert whole.mean > 0
    np.testing.assert_allclose(tail.values, whole.values, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("make", [of_mlps, of_convolutions])
def test_fits_that_begin_at_a_cut_are_those_from_the_feeds_on(make: Callable[[], Prepared]) -> None:
    prepared = make()
    block = max(prepared.survey.blocks, key=lambda block: block.span[0])

    def fitted(place: Beginning | None) -> Ledger:
        run = Run(prepared, Job(recipe=RECIPE), {block.name: block.units // 2})
        settle(run, [block], place)
        return run.ledger

    place = beginnings(prepared).before(prepared.batches, block.span[0])
    assert place is not None
    one, two = fitted(None), fitted(place)
    assert one.arrays
    assert one.arrays.keys() == two.arrays.keys()
    for name, array in one.arrays.items():
        np.testing.assert_allclose(two.arrays[name], array, rtol=1e-3, atol=1e-4)


def test_the_first_change_is_that_of_the_decisions() -> None:
    prepared = of_mlps()
    nothing, count = weights.empty(prepared.survey), len(list(prepared.model.graph))
    assert first_change(prepared.model.graph, prepared.survey, nothing) == count
    for block in prepared.survey.blocks:
        assert first_change(prepared.model.graph, prepared.survey, halved(prepared, block)) == block.span[0]


def test_cuts_stay_as_long_as_there_is_room() -> None:
    prepared = of_mlps()
    _, first = last_of(prepared)
    many = beginnings(prepared)
    place = many.before(prepared.batches, first)
    assert place is not None
    assert many.before(prepared.batches, first) is place
    assert many.before(prepared.batches, 0) is None
    size = sum(array.nbytes for tensors in place.tensors for array in tensors.values())
    assert beginnings(prepared, size - 1).before(prepared.batches, first) is None
    assert beginnings(prepared, size).before(prepared.batches, first) is not None


def test_cuts_that_were_used_last_stay() -> None:
    prepared = of_mlps()
    _, first = last_of(prepared)
    feeds = prepared.batches.feeds
    assert len(feeds) > 1
    one, two = (part_of(prepared.batches, feeds[start::2]) for start in (0, 1))
    whole = beginnings(prepared).before(one, first)
    assert whole is not None
    size = sum(array.nbytes for tensors in whole.tensors for array in tensors.values())
    few = beginnings(prepared, size + size // 2)
    place = few.before(one, first)
    assert few.before(one, first) is place
    assert few.before(two, first) is not None
    assert few.before(one, first) is not place  # it was dropped for the other one
