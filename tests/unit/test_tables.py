"""Tables in one file: lines of JSON and Parquet, with the columns that saved data sets may have."""

from __future__ import annotations

import json

import numpy as np
import pytest

from onnxgrail.calibration.feeds.kinds import datasets
from onnxgrail.calibration.feeds.reading import Reading
from onnxgrail.errors import DataError
from tests.reading import read
from tests.unit import samples
from tests.unit.test_kinds import BERT, LM, batch

ROWS = [{"input_ids": [1, 2, 3], "labels": 0}, {"input_ids": [4], "labels": 1}]


def write(path, rows):
    """Write rows in the format that the suffix names."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_token_ids(tmp_path, suffix):
    file = write(tmp_path / f"d.{suffix}", ROWS)
    batches = read(file, BERT)
    made = next(iter(batches))
    np.testing.assert_array_equal(made["input_ids"], [[1, 2, 3], [4, 0, 0]])
    np.testing.assert_array_equal(made["attention_mask"], [[1, 1, 1], [1, 0, 0]])
    (fed,) = batches.labelled()
    np.testing.assert_array_equal(fed[1].values, [0, 1])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_texts_with_the_tokenizer_of_a_folder(tmp_path, suffix):
    file = write(tmp_path / f"d.{suffix}", [{"text": "w0 w1", "source": "a"}, {"text": "w2", "source": "b"}])
    samples.tokenizer(tmp_path / "tokenizer.json")
    np.testing.assert_array_equal(batch(file, BERT, tokenizer=tmp_path)["input_ids"], [[2, 3], [4, 0]])
    with pytest.raises(DataError, match=r"'text' need a tokenizer"):
        read(file, BERT)
    np.testing.assert_array_equal(batch(file, LM, tokenizer=tmp_path)["input_ids"], [[2, 3, 4]])
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    with pytest.raises(DataError, match=r"vocab.txt' is no tokenizer .* Give a tokenizer.json"):
        batch(file, BERT, tokenizer=tmp_path / "vocab.txt")


@pytest.mark.parametrize(("most", "share"), [(2**26, 1), (2000, 0.3)])
def test_texts_are_joined_and_cut_where_there_is_no_mask(tmp_path, monkeypatch, most, share):
    monkeypatch.setattr(datasets, "MOST", most)
    names = [f"w{n}" for n in range(1000)]
    rows = [{"text": " ".join(names[n : n + 8]), "label": 0} for n in range(0, 1000, 8)]
    reading = Reading(tokenizer=samples.tokenizer(tmp_path / "t.json", names), sequence_length=20)
    batches = read(write(tmp_path / "d.jsonl", rows), LM, reading=reading)
    made = np.concatenate([feed["input_ids"] for feed in batches])
    assert made.shape[0] > 30 * share
    steps = np.diff(made, axis=1)
    assert set(np.unique(steps)) == ({1} if share == 1 else {1, 17})  # the next word, or that of the third row
    assert not batches.has_labels


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"input_ids": [1, 2]}\n{"input_ids": "x"}\n', "cannot read .*d.jsonl"),
        ("d.jsonl", b"[1, 2]\n", "cannot read .*d.jsonl"),
        ("d.jsonl", b"", "cannot read .*d.jsonl"),
        ("d.parquet", b"PAR1 is how it begins", "cannot read .*d.parquet"),
    ],
)
def test_broken_tables(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name, BERT)


def test_rows_without_a_text_are_left_out(tmp_path):
    rows = [
        {"text": "w0", "label": 3},
        {"text": None, "label": 4},
        {"text": "  ", "label": 5},
        {"text": "w1", "label": 6},
    ]
    samples.tokenizer(tmp_path / "tokenizer.json")
    batches = read(write(tmp_path / "d.parquet", rows), BERT, reading=Reading(tokenizer=tmp_path))
    (fed,) = batches.labelled()
    np.testing.assert_array_equal(fed[0]["input_ids"], [[2], [3]])
    np.testing.assert_array_equal(fed[1].values, [3, 6])
    assert "d.parquet: 2 rows without a text are left out" in batches.notes
    with pytest.raises(DataError, match="no row has a text in 'text'"):
        batch(write(tmp_path / "e.parquet", rows[1:2] * 2 + rows[2:3]), BERT, tokenizer=tmp_path)
    write(tmp_path / "ids.jsonl", ROWS)  # the tokenizer of a folder is not for token ids
    np.testing.assert_array_equal(batch(tmp_path / "ids.jsonl", BERT, tokenizer=tmp_path)["input_ids"][0], [1, 2, 3])


def test_a_table_without_rows(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"input_ids": arrow.array([], arrow.list_(arrow.int64()))})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "d.parquet")
    with pytest.raises(DataError, match="holds no samples"):
        read(tmp_path / "d.parquet", BERT)
