"""Copies of samples, and samples that follow each other, do not judge fits to each other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxgrail.calibration.feeds.alike import following, ordered, unmixed
from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.judging import EACH, apart, judging
from onnxgrail.core import Floats
from onnxgrail.errors import DataError


def batches(x: Floats, size: int = 8) -> Batches:
    makes = [lambda part=x[n : n + size]: {"x": part} for n in range(0, len(x), size)]
    return Batches(feeds=tuple(makes), samples=len(x), source="a.npz")


def sides(found: Batches) -> tuple[Floats, Floats]:
    """The samples that are fitted to, and those that judge."""
    judge = {*judging(found)}
    parts = [[feed["x"] for n, feed in enumerate(found) if (n in judge) is side] for side in (False, True)]
    fitted, judged = (np.concatenate(part) for part in parts)
    return fitted, judged


def drawn(count: int, *, seed: int = 0, width: int = 20) -> Floats:
    return np.random.default_rng(seed).normal(size=(count, width))


@pytest.mark.parametrize("count", [128, 400])
def test_other_data_stay_as_they_are(count: int) -> None:
    given_ones = batches(drawn(count))
    assert unmixed(given_ones) is given_ones


def test_all_copies_of_a_sample_are_on_one_side() -> None:
    found = unmixed(batches(np.concatenate([drawn(128)] * 2)))
    fitted, judged = sides(found)
    assert not {*map(bytes, fitted)} & {*map(bytes, judged)}
    assert len(fitted) + len(judged) == 256
    assert found.notes == ("128 of 256 samples are copies of others, which say nothing more",)


def test_copies_that_are_everywhere_are_told() -> None:
    places = np.random.default_rng(1).integers(0, 10, 128)
    (told,) = unmixed(batches(drawn(10)[places])).notes
    assert told.startswith("118 of 128 samples are copies of others")
    assert told.endswith("; 64 of those that judge are copies of samples that fits have seen: others may lose more")


def test_equal_samples_say_nothing() -> None:
    with pytest.raises(DataError, match=r"all 64 samples of a\.npz are the same"):
        unmixed(batches(np.ones((64, 3))))
    one = batches(np.ones((1, 3)))
    assert unmixed(one) is one


@pytest.mark.parametrize("scenes", [16, 40])
def test_frames_of_a_scene_are_on_one_side(scenes: int) -> None:
    frames = np.repeat(drawn(scenes), 16, axis=0) + 0.05 * drawn(16 * scenes, seed=1)
    found = unmixed(batches(frames))
    fitted, judged = sides(found)
    distances = np.linalg.norm(fitted[:, None] - judged[None], axis=2)
    assert distances.min() > 1  # frames of a scene are about 0.3 apart
    assert "frames of a scene" in found.notes[0]


def test_of_one_long_recording_quarters_judge() -> None:
    walk = np.cumsum(drawn(256, width=2), axis=0)
    fitted, judged = sides(unmixed(batches(walk)))
    order = np.concatenate([fitted, judged])
    jumps = np.linalg.norm(np.diff(judged, axis=0), axis=1) > 8
    assert len(order) == 256
    assert jumps.sum() <= 3


@pytest.mark.parametrize(("width", "size"), [*itertools.product((1, 2, 30), (1, 8))])
def test_data_without_an_order_have_no_neighbors(width: int, size: int) -> None:
    for seed in range(20):
        x = drawn(20 * size, seed=seed, width=width)
        assert not following([[x[n : n + size]] for n in range(0, len(x), size)])


def test_sorted_classes_are_no_scenes() -> None:
    classes = np.repeat(1.5 * drawn(10), 24, axis=0)
    x = classes + drawn(240, seed=1)
    assert not following([[x[n : n + 8]] for n in range(0, 240, 8)])


def test_feeds_of_other_shapes_are_not_compared() -> None:
    sizes = [3 + n % 5 for n in range(20)]
    assert not following([[drawn(8, width=size)] for size in sizes])


@given(st.lists(st.integers(1, 9), min_size=2, max_size=30), st.sampled_from([2, EACH]))
def test_an_order_has_every_feed_once_and_groups_that_fit_are_whole(sizes: list[int], each: int) -> None:
    ends = np.cumsum(sizes)
    groups = [range(end - size, end) for end, size in zip(ends.tolist(), sizes, strict=True)]
    places = range(each // 2, sum(sizes), each)
    if not places:
        return
    order = ordered(groups, places)
    assert sorted(order) == list(range(sum(sizes)))
    if set(sizes) == {1}:
        judge = {order[place] for place in places}
        assert len(judge) == len(places)


def test_a_fifth_is_held_back_from_many() -> None:
    rest, held = apart(unmixed(batches(np.concatenate([drawn(400)] * 2))))
    assert held is not None
    assert held.samples == 160
    known = {bytes(row) for feed in rest for row in feed["x"]}
    assert not any(bytes(row) in known for feed in held for row in feed["x"])
