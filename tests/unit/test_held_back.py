"""Samples held back from the calibration data: as many as asked, others than those that stay, from everywhere."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgrail.calibration.data import read_apart
from onnxgrail.errors import DataError

from .test_data import FIXED, OPEN, rows, sizes


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(2, 40), apart=st.integers(1, 39), samples=st.none() | st.integers(1, 40), seed=st.integers(0, 3)
)
def test_held_back_samples_are_others(count, apart, samples, seed):
    taken = count if samples is None else min(count, samples + apart)
    options = {"samples": samples, "batch_size": 4, "seed": seed}
    if apart >= taken:
        with pytest.raises(DataError, match="held out"):
            read_apart({"x": rows(count)}, OPEN, apart, **options)
        return
    rest, held = read_apart({"x": rows(count)}, OPEN, apart, **options)
    assert (rest.samples, held.samples) == (taken - apart, apart)
    firsts = [{int(row[0]) for feed in batches for row in feed["x"]} for batches in (rest, held)]
    assert [len(some) for some in firsts] == [taken - apart, apart]
    assert not firsts[0] & firsts[1]


def test_held_back_samples_are_spread_over_the_data():
    _, held = read_apart({"x": rows(100)}, OPEN, 4)
    assert [int(row[0]) // 3 for feed in held for row in feed["x"]] == [12, 37, 62, 87]


def test_a_fixed_batch_holds_for_both():
    rest, held = read_apart({"x": rows(20)}, FIXED, 9)
    assert (sizes(rest), sizes(held)) == ([4, 4], [4, 4])
    with pytest.raises(DataError, match="batches of exactly 4"):
        read_apart({"x": rows(20)}, FIXED, 3)
