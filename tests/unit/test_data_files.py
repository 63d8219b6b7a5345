"""Calibration data from files: arrays, folders of them, test data sets and functions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxgrail.calibration.feeds.kinds import arrays
from onnxgrail.errors import DataError
from tests.reading import read
from tests.unit.test_data import FIXED, OPEN, entry, rows, sizes


def test_npz(tmp_path):
    np.savez(tmp_path / "d.npz", x=rows(5))
    assert sizes(read(tmp_path / "d.npz", OPEN)) == [5]
    assert read(str(tmp_path / "d.npz"), OPEN).source.endswith("d.npz")


@pytest.mark.parametrize("large", [False, True])
def test_npy(large, tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "LARGE", 1 if large else 2**26)
    np.save(tmp_path / "d.npy", rows(5))
    batches = read(tmp_path / "d.npy", OPEN, batch_size=2)
    assert sizes(batches) == [2, 2, 1]
    assert isinstance(batches.feeds[0].parts[0].arrays["x"], arrays.Stored) is large
    with pytest.raises(DataError, match="holds one array, the model takes 2 inputs"):
        read(tmp_path / "d.npy", (*OPEN, entry("y")))


def test_files_of_a_folder_share_batches(tmp_path):
    for number in range(10):
        np.savez(tmp_path / f"{number}.npz", x=rows(1) + number)
    batches = read(tmp_path, FIXED)
    assert sizes(batches) == [4, 4]
    np.testing.assert_array_equal(next(iter(batches))["x"][:, 0], [0, 1, 2, 3])


def test_files_of_different_shape_do_not(tmp_path):
    np.save(tmp_path / "1.npy", rows(3, 5))
    np.save(tmp_path / "2.npy", rows(3, 6))
    assert sizes(read(tmp_path, (entry(shape=("n", "m")),), batch_size=2)) == [2, 1, 2, 1]


def test_folder_of_npy_by_input_name(tmp_path):
    np.save(tmp_path / "x.npy", rows(3))
    np.save(tmp_path / "y.npy", rows(3))
    assert sizes(read(tmp_path, (*OPEN, entry("y")))) == [3]


def test_onnx_test_data_sets(tmp_path):
    for number in range(2):
        folder = tmp_path / f"test_data_set_{number}"
        folder.mkdir()
        (folder / "input_0.pb").write_bytes(numpy_helper.from_array(rows(2) + number).SerializeToString())
        (folder / "output_0.pb").write_bytes(b"not looked at")
    batches = read(tmp_path, OPEN)
    assert sizes(batches) == [2, 2]
    assert sizes(read(tmp_path / "test_data_set_1", OPEN)) == [2]
    tensor = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    (tmp_path / "test_data_set_0" / "input_0.pb").write_bytes(tensor.SerializeToString())
    with pytest.raises(DataError, match="points to another file"):
        read(tmp_path, OPEN)


def test_function_in_a_file(tmp_path):
    script = tmp_path / "feeds.py"
    script.write_text(
        "import numpy as np\n"
        "def some():\n    for n in (2, 3):\n        yield {'x': np.ones((n, 3), np.float32)}\n"
        "def forever():\n    while True:\n        yield {'x': np.ones((1, 3), np.float32)}\n"
        "def wrong():\n    return [1]\n"
        "def none():\n    return []\n"
        "def nothing():\n    pass\n"
        "def fails():\n    raise KeyError('key')\n"
    )
    batches = read(f"{script}:some", OPEN, batch_size=1)
    assert sizes(batches) == sizes(batches) == [2, 3]
    endless = read(f"{script}:forever", OPEN)
    assert endless.samples == 1024
    assert "--samples" in endless.notes[-1]
    assert read(f"{script}:forever", OPEN, samples=3).samples == 3
    for name, message in [
        ("wrong", "got int, expected a dict"),
        ("nothing", "nothing returns NoneType, expected an iterable of dicts"),
        ("none", "no samples"),
        ("fails", "raised KeyError"),
        ("absent", "defines no 'absent'"),
    ]:
        with pytest.raises(DataError, match=message):
            read(f"{script}:{name}", OPEN)


def test_broken_files_are_one_line(tmp_path):
    (tmp_path / "a.npz").write_text("text")
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "c.csv").write_text("1,2")
    (tmp_path / "e").mkdir()
    np.save(tmp_path / "d.npy", np.array([object()]), allow_pickle=True)
    np.savez(tmp_path / "f.npz", x=np.array([object()]))
    for name in ("a.npz", "b.npy", "c.csv", "d.npy", "e", "f.npz", "absent.npz", "c.py"):
        with pytest.raises(DataError) as caught:
            read(tmp_path / name, OPEN)
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)
