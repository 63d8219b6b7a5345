"""The highest scores of a sample against sorting all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxgrail.fidelity.measures.scores import nth_highest


@given(st.integers(0, 1000), st.integers(1, 900), st.integers(1, 40), st.sampled_from([0, 1, 4, 1000]))
def test_the_nth_highest_is_that_of_all_in_order(seed: int, count: int, share: int, levels: int) -> None:
    scores = np.random.default_rng(seed).random((3, count))
    scores = np.round(scores * levels) / max(levels, 1)  # equal scores, and all of them
    place = max(1, count // share)
    np.testing.assert_array_equal(nth_highest(scores, place), np.sort(scores, axis=1)[:, -place, None])


@pytest.mark.parametrize("every", [0.0, 1.0])
def test_where_the_bound_is_far_off(every: float) -> None:
    scores = np.random.default_rng(0).random((1, 6400)) / 2
    scores[:, ::64] = every  # the scores that give the bound
    np.testing.assert_array_equal(nth_highest(scores, 64), np.sort(scores, axis=1)[:, -64, None])
