"""Saved Hugging Face data sets: columns, rows of different lengths, splits, and broken folders."""

from __future__ import annotations

import json

import numpy as np
import pytest

from onnxgrail.calibration.feeds.signature import Input
from onnxgrail.errors import DataError
from onnxgrail.fidelity.goals import Goals, classes_of
from tests.reading import read
from tests.unit import samples
from tests.unit.test_kinds import BERT, I64, LM, NCHW, batch


@pytest.fixture
def words(tmp_path):
    """A tokenizer of words: `w0` is 2, `w1` is 3 ..."""
    return samples.tokenizer(tmp_path / "t.json")


def test_columns_feed_inputs_and_others_are_left_out(tmp_path):
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    samples.dataset(tmp_path, {"input_ids": rows, "label": [0, 1, 0]}, files=2)
    batches = read(tmp_path, BERT)
    made = next(iter(batches))
    np.testing.assert_array_equal(made["input_ids"], rows)
    assert made["attention_mask"].all()
    assert any("'label' not used" in note for note in batches.notes)


def test_rows_of_different_lengths_are_padded_with_a_mask(tmp_path):
    rows = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1]]
    samples.dataset(tmp_path, {"input_ids": rows}, files=2)
    batches = read(tmp_path, BERT, batch_size=2)
    assert "'attention_mask', filled with the lengths" in batches.notes[0]
    made = list(batches)
    np.testing.assert_array_equal(made[0]["input_ids"], [[1, 2, 3], [4, 0, 0]])
    np.testing.assert_array_equal(made[0]["attention_mask"], [[1, 1, 1], [1, 0, 0]])
    np.testing.assert_array_equal(made[1]["attention_mask"], [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    with pytest.raises(DataError, match="rows have different lengths, and the model has no attention mask"):
        read(tmp_path, LM)
    fixed = tuple(Input(name=e.name, dtype=I64, shape=("n", 4)) for e in BERT)
    np.testing.assert_array_equal(batch(tmp_path, fixed)["input_ids"][2], [5, 6, 7, 8])


def test_labels_of_tokens_go_with_rows_of_different_lengths(tmp_path):
    rows, labels = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1]], [[0, -100, 2], [1], [0, 0, 1, 1, 2], [2]]
    samples.dataset(tmp_path, {"input_ids": rows, "labels": labels}, files=2)
    batches = read(tmp_path, BERT, batch_size=2)
    for (feed, given), some in zip(batches.labelled(), (labels[:2], labels[2:]), strict=True):
        shape = (*feed["input_ids"].shape, 3)
        classes = classes_of(Goals(labels=given), shape, feed["attention_mask"].astype(bool))
        assert [[int(c) for c in row if c >= 0] for row in classes] == [[c for c in row if c >= 0] for row in some]


def test_floats_of_python_are_rounded(tmp_path):
    samples.dataset(tmp_path / "d", {"x": [[0.1, 0.2], [0.3, 0.4]]})
    single, double = ((Input(name="x", dtype=np.dtype(kind), shape=("n", 2)),) for kind in ("float32", "float64"))
    made = batch(tmp_path / "d", single)["x"]
    np.testing.assert_array_equal(made, np.array([[0.1, 0.2], [0.3, 0.4]], np.float32))
    assert "'x' is rounded from float64 to float32" in read(tmp_path / "d", single).notes[0]
    assert read(tmp_path / "d", double).notes == ()
    samples.dataset(tmp_path / "large", {"x": [[1e300, 0.2]]})
    with pytest.raises(DataError, match="1 of 2 values are NaN or infinite"), np.errstate(over="ignore"):
        read(tmp_path / "large", single)
    with pytest.raises(DataError, match="got float64, expected float16"):
        read(tmp_path / "d", (Input(name="x", dtype=np.dtype(np.float16), shape=("n", 2)),))


def test_texts_without_a_tokenizer_say_what_they_need(tmp_path):
    samples.dataset(tmp_path, {"text": ["w0 w1", "w2"], "label": [0, 1]})
    with pytest.raises(DataError, match=r"texts 'text' need a tokenizer; .*input_ids int64.*Give --tokenizer FILE"):
        read(tmp_path, BERT)


def test_nested_lists_images_and_texts_of_a_data_set(tmp_path, words):
    values = np.arange(2 * 3 * 8 * 8, dtype=np.float32).reshape(2, 3, 8, 8)
    samples.dataset(tmp_path / "nested", {"x": values.tolist()}, float32=True)
    np.testing.assert_array_equal(batch(tmp_path / "nested", NCHW)["x"], values)
    samples.images(tmp_path / "raw", 2)
    files = [{"bytes": (tmp_path / "raw" / f"{n}.png").read_bytes(), "path": f"{n}.png"} for n in range(2)]
    samples.dataset(tmp_path / "pictures", {"image": files, "label": [0, 1]})
    np.testing.assert_array_equal(batch(tmp_path / "pictures", NCHW)["x"], batch(tmp_path / "raw", NCHW)["x"])
    samples.dataset(tmp_path / "elsewhere", {"image": [{"bytes": None, "path": "/etc/passwd"}]})
    with pytest.raises(DataError, match="no image inside the data set"):
        read(tmp_path / "elsewhere", NCHW)
    samples.dataset(tmp_path / "texts", {"text": ["w0 w1", "w2"], "title": ["a", "b"]})
    made = batch(tmp_path / "texts", BERT, tokenizer=words)
    np.testing.assert_array_equal(made["input_ids"], [[2, 3], [4, 0]])


def test_splits(tmp_path):
    for name in ("test", "train"):
        samples.dataset(tmp_path / name, {"input_ids": [[1, 2]] * len(name)})
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    batches = read(tmp_path, LM)
    assert batches.samples == 5
    assert "taken split 'train' of test, train" in batches.notes[0]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["../train"]}')
    with pytest.raises(DataError, match="names no splits"):
        read(tmp_path, LM)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": [{"filename": "../outside.arrow"}]}, "names no files in its folder"),
        ({"_data_files": [{"filename": "/outside.arrow"}]}, "names no files in its folder"),
        ({"_data_files": []}, "holds no samples"),
        ([], "not what save_to_disk writes"),
        ({"_data_files": [{"filename": "absent.arrow"}]}, "cannot read"),
        ({"_data_files": [{"filename": "broken.arrow"}]}, "cannot read"),
        ({"_data_files": [{"filename": "a.arrow"}], "_indices_files": [{"filename": "i.arrow"}]}, "flatten_indices"),
    ],
)
def test_broken_data_sets(tmp_path, state, message):
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "broken.arrow").write_text("no table")
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path, LM)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("shape", "colors"), [(("n", 1), [["red"], ["blue"]]), (("n",), ["red", "blue"])])
def test_text_columns_feed_inputs_of_strings(tmp_path, shape, colors):
    color = Input(name="color", dtype=np.dtype(object), shape=shape)
    number = Input(name="x", dtype=np.dtype(np.float32), shape=("n", 2))
    samples.dataset(tmp_path, {"x": [[0.5, 1.0], [1.5, 2.0]], "color": colors, "comment": ["a", "b"]})
    made = batch(tmp_path, (number, color))
    np.testing.assert_array_equal(made["color"], colors)
    assert str(color) == f"color string[{', '.join(map(str, shape))}]"
