"""Union-find over channel labels against a naive one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgrail.core import Refusal
from onnxgrail.graph.trace.labels import Labels, Mark

WHY = Refusal(value="v", node="n", op="o", reason="first")
LATER = Refusal(value="v", node="n", op="o", reason="later")


def naive(count: int, pairs: list[tuple[int, int]]) -> list[set[int]]:
    """Classes of 1..count after merging pairs, by brute force; pairs with 0 merge nothing."""
    classes = [{k} for k in range(1, count + 1)]
    for a, b in pairs:
        if a and b:
            left = next(c for c in classes if a in c)
            right = next(c for c in classes if b in c)
            if left is not right:
                left |= right
                classes.remove(right)
    return classes


SIZE = 12
PAIRS = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=25)


@settings(max_examples=150)
@given(st.lists(PAIRS, max_size=4))
def test_union_and_freeze_agree_with_brute_force(batches: list[list[tuple[int, int]]]) -> None:
    labels = Labels()
    assert labels.fresh(SIZE).tolist() == list(range(1, SIZE + 1))
    for batch in batches:
        if batch:
            a, b = np.array(batch, dtype=np.int64).T
            labels.union(a, b, WHY)
    pairs = [p for batch in batches for p in batch]
    classes = naive(SIZE, pairs)
    roots = labels.find(np.arange(SIZE + 1))
    assert roots[0] == 0
    assert sorted(min(c) for c in classes) == sorted(set(roots[1:].tolist()))
    assert all(roots[k] == min(c) for c in classes for k in c)
    touched = {k for p in pairs if 0 in p for k in p if k}
    assert set(labels.frozen()) == {min(c) for c in classes if c & touched}


def test_union_broadcasts_one_label_over_many() -> None:
    labels = Labels()
    many = labels.fresh(5)
    labels.union(many[:1], many[1:4].reshape(3, 1), WHY)
    assert labels.find(many).tolist() == [1, 1, 1, 1, 5]


def test_fresh_labels_keep_coming() -> None:
    labels = Labels()
    first, second = labels.fresh(1000), labels.fresh(5000)
    assert len(np.unique(np.concatenate([first, second]))) == 6000
    labels.union(first[:1], second[-1:], WHY)
    assert labels.find(second[-1:]).tolist() == [1]


def test_the_first_reason_stays_also_after_later_merges() -> None:
    labels = Labels()
    a, b = labels.fresh(2)
    labels.freeze(np.array([b, 0]), WHY)
    labels.union(np.array([a]), np.array([b]), LATER)
    labels.freeze(np.array([a]), LATER)
    assert labels.frozen() == {int(a): WHY}


def test_marks_lose_axes_along_which_nothing_varies() -> None:
    labels = Labels()
    row = labels.fresh(3)
    mark = labels.normal(Mark((0, 2), np.tile(row, (4, 1))), WHY)
    assert mark is not None
    assert mark.axes == (2,)
    assert mark.labels.tolist() == row.tolist()


def test_a_mark_of_one_class_is_frozen() -> None:
    labels = Labels()
    row = labels.fresh(3)
    labels.union(row[:1], row, LATER)
    assert labels.normal(Mark((1,), row), WHY) is None
    assert labels.frozen() == {1: WHY}


def test_tying_an_axis_keeps_the_other() -> None:
    labels = Labels()
    grid = labels.fresh(6).reshape(2, 3)
    mark = labels.tie(Mark((1, 3), grid), [3], WHY)
    assert mark is not None
    assert mark.axes == (1,)
    assert mark.labels.tolist() == [1, 4]
    assert labels.tie(mark, [1], WHY) is None
    assert labels.tie(Mark((0,), labels.fresh(2)), [5], WHY) is not None


@pytest.mark.parametrize(("axes", "want"), [((0, 1), [[1, 1], [2, 2]]), ((1, 2), [[1, 2], [1, 2]])])
def test_broadcasting_a_mark_to_more_axes(axes: tuple[int, int], want: list[list[int]]) -> None:
    own = axes[0] if want[0][0] == want[0][1] else axes[1]
    mark = Mark((own,), np.array([1, 2]))
    assert mark.on(axes, (2, 2)).tolist() == want


def test_tying_to_a_permanent_position_stops_the_rest() -> None:
    """A label that merges with nothing must not look as if it still could be tied: callers would try without end."""
    labels = Labels()
    fresh = labels.fresh(3)
    mark = Mark((1, 2), np.stack([fresh, np.zeros(3, dtype=np.int64)]))
    assert labels.tie(mark, [1], WHY) is None
    assert set(fresh.tolist()) <= set(labels.frozen())
