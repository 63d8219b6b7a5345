"""Which array feeds which input, and what is filled in."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.calibration.feeds.signature import Input
from onnxgrail.errors import DataError
from tests.reading import read

I64 = np.dtype(np.int64)


def ids(name: str, dtype: np.dtype = I64, shape: tuple = ("batch", "sequence")) -> Input:
    return Input(name=name, dtype=dtype, shape=shape)


BERT = (ids("input_ids"), ids("attention_mask"), ids("token_type_ids"))
DECODER = (ids("input_ids"), ids("attention_mask", np.dtype(np.int32)), ids("position_ids"))
TOKENS = np.arange(12).reshape(3, 4)


def feed(arrays, signature):
    batches = read(arrays, signature)
    return next(iter(batches)), batches.notes


def test_the_only_array_that_fits_is_taken_with_a_note():
    signature = (Input(name="x", dtype=np.dtype(np.float32), shape=("n", 3)), ids("ids"))
    picture = np.ones((3, 3), np.float32)
    found, notes = feed({"image": picture, "tokens": TOKENS}, signature)
    np.testing.assert_array_equal(found["x"], picture)
    np.testing.assert_array_equal(found["ids"], TOKENS)
    assert notes == (
        "arrays: array 'image' feeds input 'x', the only one it fits",
        "arrays: array 'tokens' feeds input 'ids', the only one it fits",
    )


def test_two_candidates_are_not_guessed_between():
    with pytest.raises(
        DataError, match=r"no array for input 'input_ids', .*, has 'a' int64\[3, 4\], 'b' int64\[3, 4\]"
    ):
        read({"a": TOKENS, "b": TOKENS}, BERT)


def test_one_array_for_two_inputs_is_not_guessed():
    with pytest.raises(DataError, match="no array for input 'x', 'y', has 'a'"):
        read({"a": TOKENS}, (ids("x"), ids("y")))


def test_masks_and_types_are_filled_in():
    found, notes = feed({"input_ids": TOKENS}, BERT)
    np.testing.assert_array_equal(found["attention_mask"], np.ones((3, 4)))
    np.testing.assert_array_equal(found["token_type_ids"], np.zeros((3, 4)))
    assert notes == (
        "arrays: no array for input 'attention_mask', filled with ones",
        "arrays: no array for input 'token_type_ids', filled with zeros",
    )


def test_a_mask_of_another_name_is_used_and_not_filled_in():
    mask = (TOKENS % 4 < 3).astype(np.int64)
    found, _ = feed({"input_ids": TOKENS, "padding": mask}, BERT[:2])
    np.testing.assert_array_equal(found["attention_mask"], mask)


def test_positions_leave_out_padding_before_a_text():
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]], np.int32)
    found, _ = feed({"input_ids": TOKENS, "attention_mask": mask}, DECODER)
    np.testing.assert_array_equal(found["position_ids"], [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 1, 2]])
    found, _ = feed({"input_ids": TOKENS}, (DECODER[0], DECODER[2]))
    np.testing.assert_array_equal(found["position_ids"], [[0, 1, 2, 3]] * 3)


def test_what_is_cached_counts_for_masks_and_positions():
    past = Input(name="past_key_values.0.key", dtype=np.dtype(np.float32), shape=("batch", 2, "past", 8))
    arrays = {"input_ids": TOKENS, past.name: np.zeros((3, 2, 5, 8), np.float32)}
    found, _ = feed(arrays, (*DECODER, past))
    assert (found["attention_mask"].shape, found["attention_mask"].dtype) == ((3, 9), np.int32)
    assert found["attention_mask"].all()
    np.testing.assert_array_equal(found["position_ids"], [[5, 6, 7, 8]] * 3)


def test_caches_that_are_missing_hold_nothing():
    past = tuple(
        Input(name=f"past_key_values.0.{what}", dtype=np.dtype(np.float32), shape=("batch", 2, "past", 8))
        for what in ("key", "value")
    )
    found, notes = feed({"input_ids": TOKENS}, (*DECODER, *past))
    assert {found[entry.name].shape for entry in past} == {(3, 2, 0, 8)}
    assert found["attention_mask"].shape == (3, 4)
    np.testing.assert_array_equal(found["position_ids"], [[0, 1, 2, 3]] * 3)
    assert "2 key-value caches" in notes[0]
    fixed = Input(name=past[0].name, dtype=past[0].dtype, shape=("batch", 2, 7, 8))
    with pytest.raises(DataError, match=r"no array for input 'past_key_values\.0\.key'"):
        read({"input_ids": TOKENS}, (*DECODER, fixed))


def test_ready_feeds_are_filled_in_too():
    batches = read([{"input_ids": TOKENS}, {"input_ids": TOKENS[:, :2]}], BERT)
    assert [f["attention_mask"].shape for f in batches] == [(3, 4), (3, 2)]


def test_a_float_mask_is_not_guessed():
    # Ones may mean "keep" or be added to scores: nobody can tell.
    signature = (BERT[0], ids("attention_mask", np.dtype(np.float32)))
    with pytest.raises(DataError, match="no array for input 'attention_mask'"):
        read({"input_ids": TOKENS}, signature)


def test_decoders_have_their_own_tokens():
    signature = tuple(
        ids(name) for name in ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    )
    found, _ = feed({"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :1]}, signature)
    assert found["attention_mask"].shape == (3, 4)
    assert found["decoder_attention_mask"].shape == (3, 1)
