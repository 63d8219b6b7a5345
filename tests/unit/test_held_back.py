"""Samples held back from the calibration data: as many as asked, others than those that stay, from everywhere."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgrail.calibration.feeds.data import read_apart
from onnxgrail.calibration.feeds.judging import gate, ungated
from onnxgrail.calibration.feeds.reading import Sampling
from onnxgrail.errors import DataError

from .test_data import FIXED, OPEN, rows, sizes


@settings(max_examples=40)
@given(
    count=st.integers(2, 40), apart=st.integers(1, 39), samples=st.none() | st.integers(1, 40), seed=st.integers(0, 3)
)
def test_held_back_samples_are_others(count, apart, samples, seed):
    taken = count if samples is None else min(count, samples + apart)
    options = {"samples": samples, "batch_size": 4, "seed": seed}
    if apart >= taken:
        with pytest.raises(DataError, match="held out"):
            read_apart({"x": rows(count)}, OPEN, apart, Sampling(**options))
        return
    rest, held = read_apart({"x": rows(count)}, OPEN, apart, Sampling(**options))
    assert (rest.samples, held.samples) == (taken - apart, apart)
    firsts = [{int(row[0]) for feed in batches for row in feed["x"]} for batches in (rest, held)]
    assert [len(some) for some in firsts] == [taken - apart, apart]
    assert not firsts[0] & firsts[1]


def numbers(batches) -> list[int]:
    """Which rows of `rows(n)` batches hold."""
    return [int(row[0]) // 3 for feed in batches for row in feed["x"]]


def test_held_back_samples_are_spread_over_the_data():
    _, held = read_apart({"x": rows(100)}, OPEN, 4)
    assert [number // 25 for number in numbers(held)] == [0, 1, 2, 3]


# -------------------------------------------------------------------------------------------- where nobody asked for it


@pytest.mark.parametrize(
    ("count", "samples", "fitted", "judging"),
    [
        (31, None, 31, 0),  # too few to spare any
        (32, None, 24, 8),
        (100, None, 80, 20),
        (5000, None, 4744, 256),
        (1000, 128, 128, 26),  # others than those that are fitted to
        (1000, 16, 16, 8),
        (20, 16, 16, 0),
        (33, 30, 25, 8),
        (100, 100, 80, 20),
    ],
)
def test_a_fifth_of_the_data_judges(count, samples, fitted, judging):
    rest, held = read_apart({"x": rows(count)}, OPEN, None, Sampling(samples=samples))
    assert rest.samples == fitted
    assert (0 if held is None else held.samples) == judging
    assert not rest.notes
    if held is not None:
        assert not set(numbers(rest)) & set(numbers(held))


def test_the_same_samples_judge_every_time():
    first, second = (numbers(read_apart({"x": rows(100)}, OPEN, None)[1]) for _ in range(2))
    assert first == second
    assert first != numbers(read_apart({"x": rows(100)}, OPEN, None, Sampling(seed=1))[1])


@pytest.mark.parametrize("label", [lambda n: n // 100, lambda n: n % 10, lambda n: n % 5])
def test_classes_judge_as_often_as_they_are_there(label):
    """Sorted by class, and in turn: where every fifth sample was taken, classes in turn would be two of ten."""
    _, held = read_apart({"x": rows(1000)}, OPEN, None)
    counts = np.bincount([label(number) for number in numbers(held)])
    assert counts.min() >= 0.5 * counts.mean()


@pytest.mark.parametrize(("count", "judging"), [(31, 0), (32, 8), (64, 12), (101, 20), (7, 0)])
def test_a_fixed_batch_is_held_back_whole(count, judging):
    rest, held = read_apart({"x": rows(count)}, FIXED, None)
    assert (0 if held is None else held.samples) == judging
    assert rest.samples == (count - judging) // 4 * 4


def test_a_large_fixed_batch_leaves_two_thirds():
    """Of two batches none is spared, of three one."""
    entry = dataclasses.replace(FIXED[0], shape=(40, *FIXED[0].shape[1:]))
    for count, judging in ((80, 0), (120, 40)):
        _, held = read_apart({"x": rows(count)}, (entry,), None)
        assert (0 if held is None else held.samples) == judging


def feeds(count: int, each: int):
    """Ready feeds from a function that nobody knows the length of."""
    return ({"x": rows(count * each)[each * n : each * (n + 1)]} for n in range(count))


@pytest.mark.parametrize(
    ("count", "each", "samples", "judging"),
    [(10, 4, None, 8), (40, 1, None, 8), (7, 4, None, 0), (2, 50, None, 0), (3, 50, None, 50), (50, 4, 32, 8)],
)
def test_ready_feeds_are_held_back_whole(count, each, samples, judging):
    rest, held = read_apart(feeds(count, each), OPEN, None, Sampling(samples=samples))
    assert (0 if held is None else held.samples) == judging
    assert rest.samples == (count * each - judging if samples is None else samples)


def test_a_fixed_batch_holds_for_both():
    rest, held = read_apart({"x": rows(20)}, FIXED, 9)
    assert (sizes(rest), sizes(held)) == ([4, 4], [4, 4])
    with pytest.raises(DataError, match="batches of exactly 4"):
        read_apart({"x": rows(20)}, FIXED, 3)


@pytest.mark.parametrize(
    ("count", "judging", "fitted"),
    [(1, [], 1), (2, [1], 2), (3, [2], 3), (4, [3], 3), (5, [4], 4), (12, [4, 9], 10)],
)
def test_compensation_leaves_the_batches_that_judge_a_refinement_unless_they_are_most(count, judging, fitted):
    batches, _ = read_apart({"x": rows(4 * count)}, OPEN, 0, Sampling(batch_size=4))
    rest = ungated(batches)
    assert gate(count) == judging
    assert (len(rest), rest.samples) == (fitted, 4 * fitted)
    left = [k for k in range(count) if fitted == count or k not in judging]
    assert rest.feeds == tuple(batches.feeds[k] for k in left)
