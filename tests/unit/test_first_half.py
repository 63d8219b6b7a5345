"""A candidate that loses far too much on one half of the samples is not fitted again to be judged by the other half."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from onnxgrail.calibration.judge import Answers, Judge
from onnxgrail.core import Array, Feed
from onnxgrail.fidelity import Tally
from onnxgrail.fidelity.intervals import upper_bound
from onnxgrail.fidelity.loss import SURE, Loss, beyond
from onnxgrail.fidelity.tally import FIRST
from tests.unit.test_shared_runs import RECIPE, of_mlps

LIMIT = 0.01


def classes(count: int, moved: float) -> tuple[Array, Array]:
    """Probabilities of five classes, and the same with a share of the first class given to the second."""
    rng = np.random.default_rng(count)
    a = rng.dirichlet(np.ones(5), count)
    b = a.copy()
    b[:, 0] -= moved * a[:, 0]
    b[:, 1] += moved * a[:, 0]
    return a.astype(np.float32), b.astype(np.float32)


def half(name: str, a: Array, b: Array) -> Loss | None:
    tally = Tally()
    tally.add({name: a}, {name: b})
    return beyond(tally, LIMIT, 0.5)


@pytest.mark.parametrize(("moved", "ends"), [(0.5, True), (0.02, False)])
def test_half_of_the_samples_refuses_what_loses_far_too_much(moved: float, ends: bool) -> None:
    found = half("probabilities", *classes(FIRST, moved))
    assert (found is not None) is ends
    if found is not None:
        assert len(found.values) == FIRST
        assert found.bound > LIMIT


def test_what_does_not_count_beside_others_refuses_nothing() -> None:
    rng = np.random.default_rng(0)
    low = rng.uniform(0, 0.05, (FIRST, 30, 4)).astype(np.float32)  # scores, none above 0.1
    assert half("scores", low, low[::-1]) is None
    assert half("probabilities", *classes(FIRST - 1, 0.5)) is None  # too few samples to know the content


@pytest.mark.parametrize("draw", ["few", "skewed", "alike"])
def test_other_samples_seldom_halve_the_bound(draw: str) -> None:
    rng = np.random.default_rng(0)

    def losses(count: int) -> Array:
        found = {
            "few": np.where(rng.random(count) < 0.1, rng.random(count), 0.0),
            "skewed": rng.exponential(0.01, count),
            "alike": rng.normal(0.01, 0.001, count).clip(0),
        }
        return found[draw]

    draws = [(losses(24), losses(24)) for _ in range(400)]
    pairs = [(upper_bound(np.pad(a, (0, 24)), most=1.0), upper_bound(np.append(a, b), most=1.0)) for a, b in draws]
    assert np.mean([whole < first / SURE for first, whole in pairs]) <= 0.02


@pytest.mark.parametrize(("factor", "count"), [(1.0, 2), (1.02, 2), (-1.0, 1)])
def test_the_second_half_is_opened_only_if_the_first_one_does_not_refuse(factor: float, count: int) -> None:
    prepared, opened = of_mlps(), list[int]()
    feeds = len(prepared.batches)

    with Judge(prepared.model, prepared.batches, RECIPE.providers) as judge:

        @contextmanager
        def half_of(start: int) -> Iterator[Answers]:
            opened.append(start)
            with judge.running(prepared.model, range(start, feeds, 2)) as one:

                def run(feeds: Iterator[Feed]) -> Iterator[Feed]:
                    yield from ({name: factor * value for name, value in found.items()} for found in one.run(feeds))

                yield replace(one, run=run)

        loss = judge.loss_of(map(half_of, (0, 1)), range(feeds), LIMIT)
    assert opened == [0, 1][:count]
    assert len(loss.values) == prepared.batches.samples * count // 2
