"""Data that are odd without being broken files: arrays that count differently, pipes in the place of files."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from onnxgrail.errors import DataError
from tests.reading import read
from tests.unit.test_data import OPEN, entry, rows


def test_arrays_that_count_differently_are_told():
    signature = (entry(), entry(name="mask"))
    feeds = read({"x": rows(3), "mask": rows(4)}, signature, batch_size=2)
    assert [len(feed["mask"]) for feed in feeds] == [4]
    (note,) = feeds.notes
    assert "different numbers of samples ('x' 3, 'mask' 4), passed at once" in note
    for other in ((entry(), entry(name="mask", shape=("points", 3))), (entry(), entry(name="mask", shape=(4, 3)))):
        assert read({"x": rows(3), "mask": rows(4)}, other).notes == ()
    assert read({"x": rows(3), "mask": rows(3)}, signature).notes == ()


@pytest.mark.skipif(sys.platform == "win32", reason="has no named pipes")
@pytest.mark.parametrize("name", ["x.npy", "d.npz", "test_data_set_0/input_0.pb", "state.json/a.arrow"])
def test_pipes_in_the_place_of_data_are_refused(tmp_path, name):
    if name.endswith("arrow"):
        (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    pipe = tmp_path / name.removeprefix("state.json/")
    pipe.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="is a device or a pipe"):
        read(tmp_path, OPEN)


def test_feeds_that_share_one_buffer_keep_their_values():
    rows = np.random.default_rng(0).random((6, 3), np.float32)

    def reused():
        buffer = np.empty((2, 3), np.float32)
        for start in (0, 2, 4):
            buffer[:] = rows[start : start + 2]
            yield {"x": buffer}

    assert np.array_equal(np.concatenate([feed["x"] for feed in read(reused(), OPEN)]), rows)


def test_what_is_noted_of_every_feed_is_noted_once():
    feeds = [{"other": np.ones((2, 3), np.float32)} for _ in range(5)]
    assert read(feeds, OPEN).notes == ("feeds, item 0 and 4 more: array 'other' feeds input 'x', the only one it fits",)


@pytest.mark.parametrize("setting", [np.float32(0.5), np.full(1, 0.5, np.float32), np.full((4, 1), 0.5, np.float32)])
def test_a_vector_is_shared_by_samples_that_come_one_by_one(setting):
    signature = (entry(shape=(1, 3)), entry("threshold", (1,)), entry("rate", ()))
    rate = np.full(4, 9, np.float32) if np.ndim(setting) == 2 else np.float32(9)
    feeds = read({"x": rows(4), "threshold": setting, "rate": rate}, signature)
    assert feeds.samples == len(feeds) == 4
    for number, feed in enumerate(feeds):
        assert (feed["x"] == rows(4)[number : number + 1]).all()
        assert (feed["threshold"].tolist(), feed["rate"].tolist()) == ([0.5], 9)
    shared = [note for note in feeds.notes if note == "arrays: 'threshold', 'rate' shared by all 4 samples"]
    assert bool(shared) == (np.ndim(setting) < 2)
