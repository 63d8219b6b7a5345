"""Labels through a reshape against numpy's reshape of the labels of all elements."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgrail.graph.ops.tensors.layout import factor, reshaped
from onnxgrail.graph.trace.labels import Mark

PRIMES = st.lists(st.sampled_from([1, 2, 2, 3, 5]), min_size=1, max_size=6)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of one size: the same factors, dealt out to axes in two ways."""
    factors = draw(PRIMES)
    return draw(dealt(factors)), draw(dealt(draw(st.permutations(factors))))


@st.composite
def dealt(draw: st.DrawFn, factors: list[int]) -> tuple[int, ...]:
    cuts = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=4)))
    edges = [0, *cuts, len(factors)]
    return tuple(math.prod(factors[a:b]) for a, b in itertools.pairwise(edges))


def of_elements(mark: Mark, shape: tuple[int, ...]) -> np.ndarray:
    """The label of every element of a tensor."""
    return mark.on(range(len(shape)), shape)


@settings(max_examples=300)
@given(reshapes())
def test_groups_cover_all_axes_in_order_and_keep_sizes(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    before, after = shapes
    groups = list(factor(before, after))
    assert [a for left, _ in groups for a in left] == list(range(len(before)))
    assert [a for _, right in groups for a in right] == list(range(len(after)))
    for left, right in groups:
        assert math.prod(before[a] for a in left) == math.prod(after[a] for a in right)


@settings(max_examples=300)
@given(reshapes(), st.data())
def test_labels_of_elements_are_reshaped_exactly(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    before, after = shapes
    axes = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(before))), min_size=1, max_size=2))))
    sizes = [before[a] for a in axes]
    mark = Mark(axes, np.arange(1, math.prod(sizes) + 1).reshape(sizes))
    moved = reshaped(mark, before, after)
    assert moved is not None
    assert moved.labels.shape == tuple(after[a] for a in moved.axes)
    assert np.array_equal(of_elements(moved, after), of_elements(mark, before).reshape(after))


def test_groups_are_as_small_as_can_be() -> None:
    assert list(factor((2, 12, 5), (2, 4, 3, 5))) == [((0,), (0,)), ((1,), (1, 2)), ((2,), (3,))]
    assert list(factor((6, 4), (4, 6))) == [((0, 1), (0, 1))]
    marked = reshaped(Mark((1,), np.arange(12)), (2, 12, 5), (2, 4, 3, 5))
    assert marked is not None
    assert marked.axes == (1, 2)
