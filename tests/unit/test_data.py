from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxgrail.calibration.feeds.batches import Batches
from onnxgrail.calibration.feeds.data import fixed_batch
from onnxgrail.calibration.feeds.signature import Input, padding_mask, signature_of
from onnxgrail.errors import DataError, ModelError
from tests.reading import read

F32 = np.dtype(np.float32)


def entry(name="x", shape=("batch", 3), dtype=F32):
    return Input(name=name, dtype=dtype, shape=shape)


OPEN = (entry(),)
FIXED = (entry(shape=(4, 3)),)


def sizes(batches: Batches) -> list[int]:
    return [len(feed["x"]) for feed in batches]


def rows(count, width=3):
    return np.arange(count * width, dtype=np.float32).reshape(count, width)


def test_signature_leaves_out_inputs_with_defaults():
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 3, ?] x, float[2] w, int64 s) => (float[N] y) <float[2] w = {1, 2}> { y = Identity(x) }"""
    signature = signature_of(ir.from_onnx_text(text))
    assert [(e.name, e.shape) for e in signature] == [("x", ("N", 3, None)), ("s", ())]
    assert str(signature[0]) == "x float32[N, 3, ?]"


def test_several_feeds_have_one_name():
    feeds = [{"x": rows(1)}] * 3
    assert read(feeds, OPEN).source == "feeds"
    assert read(feeds[:1], OPEN).source == "feeds"


def test_signature_refuses_sequences():
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (seq(float[N]) x) => (seq(float[N]) y) { y = Identity(x) }"""
    with pytest.raises(ModelError, match="expected a tensor"):
        signature_of(ir.from_onnx_text(text))


def test_open_batch_is_cut_and_the_last_is_short():
    batches = read({"x": rows(10)}, OPEN, batch_size=4)
    assert sizes(batches) == [4, 4, 2]
    assert batches.samples == 10
    np.testing.assert_array_equal(np.concatenate([f["x"] for f in batches]), rows(10))


def test_batches_can_be_iterated_again():
    batches = read({"x": rows(5)}, OPEN, batch_size=2)
    for first, second in zip(batches, batches, strict=True):
        np.testing.assert_array_equal(first["x"], second["x"])


def test_fixed_batch_drops_the_rest_with_a_note():
    batches = read({"x": rows(10)}, FIXED, batch_size=3)
    assert sizes(batches) == [4, 4]
    assert batches.samples == 8
    assert "last 2 samples" in batches.notes[0]


def test_fixed_batch_of_exactly_the_data_is_one_feed():
    assert sizes(read({"x": rows(4)}, FIXED)) == [4]


def test_fixed_batch_of_one():
    assert sizes(read({"x": rows(100)}, (entry(shape=(1, 3)),))) == [1] * 100


def test_too_few_samples_for_a_fixed_batch():
    with pytest.raises(DataError, match=r"got 3 samples, the model takes batches of exactly 4\. Give at least 4"):
        read({"x": rows(3)}, FIXED)


@pytest.mark.parametrize(
    ("signature", "arrays"),
    [
        ((entry(shape=(2, 3)), entry("y", (9,))), {"x": rows(2), "y": np.zeros(9, np.float32)}),
        ((entry(), entry("y", ("n",))), {"x": rows(20), "y": np.zeros(7, np.float32)}),
        ((entry(), entry("y", ())), {"x": rows(20), "y": np.float32(20)}),  # it counts the samples
    ],
)
def test_ready_feeds_are_passed_as_they_are(signature, arrays):
    feeds = list(read(arrays, signature, batch_size=2))
    assert len(feeds) == 1
    for name, array in arrays.items():
        np.testing.assert_array_equal(feeds[0][name], array)


def test_arrays_of_other_lengths_are_explained():
    signature = (entry(shape=("batch", 3)), entry("state", (2, "batch", 5)))
    batches = read({"x": rows(4), "state": np.zeros((2, 1, 5), np.float32)}, signature)
    assert "differ ('x' 4, 'state' 2), so they were passed as one feed" in batches.hint
    assert batches.notes == (f"arrays: {batches.hint}",)
    assert read({"x": rows(4), "state": np.zeros((4, 2, 1, 5), np.float32)}, signature).hint == ""


def test_all_samples_share_a_number_without_axes(tmp_path):
    signature = (entry("threshold", ()), entry())
    batches = read({"x": rows(20), "threshold": np.float32(0.5)}, signature, batch_size=8)
    assert sizes(batches) == [8, 8, 4]
    assert batches.samples == 20
    assert [float(feed["threshold"]) for feed in batches] == [0.5] * 3
    for number, threshold in enumerate((0.5, 0.5, 0.25)):
        np.savez(tmp_path / f"{number}.npz", x=rows(6), threshold=np.float32(threshold))
    batches = read(tmp_path, signature, batch_size=8)
    assert [(len(feed["x"]), float(feed["threshold"])) for feed in batches] == [(6, 0.5), (6, 0.5), (6, 0.25)]


@pytest.mark.parametrize("x", [rows(4)[:, None], rows(4)], ids=["all stacked", "rows beside a state"])
def test_rows_of_stacked_feeds_are_feeds(x):
    """Arrays of a model with states have no axis that counts samples, so that feeds are stacked along a new one."""
    signature = (entry(shape=("batch", 3)), entry("state", (2, "batch", 5)), entry("rate", (), np.dtype(np.int64)))
    states = np.arange(40, dtype=np.float32).reshape(4, 2, 1, 5)
    arrays = {"x": x, "state": states, "rate": np.full(4, 16), "labels": np.arange(4)}
    batches = read(arrays, signature)
    assert batches.samples == len(batches) == 4
    for number, (feed, labels) in enumerate(batches.labelled()):
        assert {name: array.shape for name, array in feed.items()} == {"x": (1, 3), "state": (2, 1, 5), "rate": ()}
        assert (feed["state"] == states[number]).all()
        assert (feed["x"] == rows(4)[number]).all()
        assert labels.values.tolist() == [number]
    assert any("the first one counts 4 feeds" in note for note in batches.notes)
    assert read({"x": rows(4)[:, None]}, signature[:1]).samples == 4
    with pytest.raises(DataError, match="got rank 3"):
        read({"x": rows(4)[..., None]}, signature[:1])
    assert read({"rate": np.array(3)}, signature[2:]).samples == 1


def test_a_layout_with_channels_last_is_recognized():
    with pytest.raises(DataError, match=r"got 4 at axis 1 .*array.transpose\(0, 3, 1, 2\) would fit"):
        read({"x": np.zeros((2, 4, 5, 3), np.float32)}, (entry(shape=("n", 3, 4, 5)),))


def test_arrays_of_samples_must_be_equally_long():
    signature = (entry(shape=(1, 3)), entry("y", (1,)))
    with pytest.raises(DataError, match=r"different numbers of samples \('x' 5, 'y' 4\); the model takes 1 at once"):
        read({"x": rows(5), "y": np.zeros(4, np.float32)}, signature)


def test_ready_feed_must_have_the_fixed_sizes():
    signature = (entry(shape=(2, 3)), entry("y", (9,)))
    with pytest.raises(DataError, match="got 5 at axis 0"):
        read({"x": rows(5), "y": np.zeros(9, np.float32)}, signature)


@settings(max_examples=50)
@given(total=st.integers(1, 60), wanted=st.integers(1, 70), batch=st.integers(1, 9), seed=st.integers(0, 3))
def test_samples_are_spread_over_the_data(total, wanted, batch, seed):
    batches = read({"x": rows(total)}, OPEN, samples=wanted, batch_size=batch, seed=seed)
    taken = np.concatenate([f["x"] for f in batches])[:, 0] / 3
    assert batches.samples == len(taken) == min(wanted, total)
    assert (np.diff(taken) > 0).all()
    if wanted < total:
        edges = np.arange(wanted + 1) * total // wanted
        assert (edges[:-1] <= taken).all()
        assert (taken < edges[1:]).all()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "no array for input 'x'"),
        ({"y": rows(2), "z": rows(2)}, "no array for input 'x', has 'y' float32.2, 3., 'z' float32"),
        ({"z": rows(2, 4)}, "has 'z' float32.2, 4.. The model takes: x float32.batch, 3."),
        ({"x": rows(2), "z": rows(2)}, "no input named 'z'"),
        ({"x": rows(2).astype(np.int64)}, "got int64, expected float32"),
        ({"x": rows(2)[0]}, "got rank 1.*; one sample is array"),
        ({"x": rows(2, 4)}, "got 4 at axis 1"),
        ({"x": rows(2).astype(np.uint8)}, "got uint8.*float32'\\) and scale it as for training"),
        ({"x": rows(0)}, "no samples"),
        ({"x": np.full((2, 3), np.nan, np.float32)}, "6 of 6 values are NaN or infinite"),
        (
            {"x": np.ones((2, 3))},
            "got float64, expected float32. Convert it with .astype\\('float32'\\); the model takes: x",
        ),
    ],
)
def test_misfits_are_one_line(arrays, message):
    with pytest.raises(DataError, match=message) as caught:
        read(arrays, OPEN)
    assert "\n" not in str(caught.value)


def test_bad_values_are_counted_over_all_samples():
    data = rows(300)
    data[[3, 250], 1] = np.inf
    with pytest.raises(DataError, match="input 'x': 2 of 900"):
        read({"x": data}, OPEN)


def test_an_additive_mask_may_be_minus_infinity():
    signature = (entry("attn_mask"),)
    feeds = read({"attn_mask": np.full((2, 3), -np.inf, np.float32)}, signature)
    assert len(feeds) == 1


@pytest.mark.parametrize(
    ("given_dtype", "wanted"),
    [
        ("int32", "int64"),
        ("int64", "int32"),
        ("int32", "uint32"),
        ("uint8", "int32"),
        ("float16", "float32"),
        ("float32", "float64"),
        ("bfloat16", "float32"),
    ],
)
def test_conversions_that_lose_nothing_are_done_with_a_note(given_dtype, wanted):
    given_array = rows(2).astype(ml_dtypes.bfloat16 if given_dtype == "bfloat16" else given_dtype)
    batches = read({"x": given_array}, (entry(dtype=np.dtype(wanted)),))
    made = next(iter(batches))["x"]
    assert made.dtype == wanted
    np.testing.assert_array_equal(made, rows(2))
    assert batches.notes == (f"input 'x': converted from {given_dtype} to {wanted}",)


@pytest.mark.parametrize(
    ("given_dtype", "wanted"),
    [
        ("float64", "float32"),
        ("float32", "float16"),
        ("int64", "float64"),
        ("float32", "int64"),
        ("bool", "int64"),
        ("uint8", "bool"),
        ("U1", "float32"),
    ],
)
def test_conversions_that_may_lose_something_are_left_to_the_user(given_dtype, wanted):
    # Not even where these values would fit: the next file's may not.
    with pytest.raises(DataError, match=rf"expected {wanted}. Convert it with .astype\('{wanted}'\); the"):
        read({"x": np.zeros((2, 3), given_dtype)}, (entry(dtype=np.dtype(wanted)),))


@pytest.mark.parametrize(("given_dtype", "wanted", "value"), [("int64", "int32", 2**31), ("int32", "uint32", -1)])
def test_integers_that_do_not_fit_are_refused(given_dtype, wanted, value):
    ids = np.zeros((200, 3), given_dtype)
    ids[150, 1] = value  # not in the first block that is looked at
    signature = (entry(dtype=np.dtype(wanted)),)
    with pytest.raises(DataError, match=f"values from .*{value}.* do not fit {wanted}. It takes: x {wanted}"):
        read({"x": ids}, signature)
    with pytest.raises(DataError, match=f"do not fit {wanted}"):
        read([{"x": ids[150:151]}], signature)


def test_ids_beyond_the_table_are_refused():
    signature = (Input(name="x", dtype=np.dtype(np.int64), shape=("n", 3), rows=10),)
    assert read({"x": np.full((4, 3), 9)}, signature).samples == 4
    with pytest.raises(DataError, match="input 'x': ids up to 10, the model's table has 10 rows"):
        read({"x": np.full((4, 3), 10)}, signature)


def test_ready_feeds_follow_the_same_rule():
    signature = (entry(), entry("y", ("n",)))
    half = {"x": rows(5).astype(np.float16), "y": np.zeros(7, np.float32)}
    feed = next(iter(read(half, signature)))
    assert (feed["x"].dtype, feed["x"].shape) == (F32, (5, 3))
    with pytest.raises(DataError, match="astype"):
        read({"x": rows(5).astype(np.float64), "y": np.zeros(7, np.float32)}, signature)


def test_labels_are_ignored_with_a_note():
    batches = read({"x": rows(2), "labels": np.zeros(2)}, OPEN)
    assert set(next(iter(batches))) == {"x"}
    assert "labels" in batches.notes[0]


def test_a_model_without_inputs_gets_one_empty_feed():
    assert list(read({}, ())) == [{}]


def test_fixed_batch_size():
    assert fixed_batch(FIXED) == 4
    assert fixed_batch(OPEN) is None
    assert fixed_batch((entry(shape=(2, 3)), entry("y", (9,)))) is None


def test_padding_mask():
    mask = np.array([[1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(padding_mask({"attention_mask": mask}), mask == 1)
    assert padding_mask({"attention_mask": np.ones((2, 3), np.int64)}) is None
    assert padding_mask({"mask": np.zeros((2, 3), np.float32)}) is None
    assert padding_mask({"x": mask}) is None
