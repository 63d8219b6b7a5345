"""Readers of large archives, text, Polygraphy files and saved data sets, and how they refuse what is broken."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.calibration.feeds.kinds import arrays
from onnxgrail.calibration.feeds.reading import Reading
from onnxgrail.calibration.feeds.signature import Input
from onnxgrail.errors import DataError, MissingExtraError, ModelError, UsageError
from tests.reading import read
from tests.unit import samples

F32, I64, U8 = (np.dtype(kind) for kind in (np.float32, np.int64, np.uint8))


def picture(shape, dtype=F32):
    return (Input(name="x", dtype=dtype, shape=shape),)


NCHW = picture(("n", 3, 8, 8))
LM = (Input(name="input_ids", dtype=I64, shape=("batch", "sequence")),)
BERT = (*LM, Input(name="attention_mask", dtype=I64, shape=("batch", "sequence")))


def batch(path, signature, **choices):
    return next(iter(read(path, signature, batch_size=16, reading=Reading(**choices))))


def test_choices_that_do_nothing_are_refused(tmp_path):
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 3, 8, 8), np.float32))
    for choice in ({"tokenizer": tmp_path / "t.json"}, {"image_std": (1.0,)}, {"sequence_length": 4}):
        option = "--" + next(iter(choice)).replace("_", "-")
        with pytest.raises(UsageError, match=rf"{option} does nothing for \.npz"):
            read(tmp_path / "d.npz", NCHW, reading=Reading(**choice))


def test_large_arrays_of_an_archive_are_read_row_by_row(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "LARGE", 1)
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    for name, array in (("c", values), ("f", np.asfortranarray(values)), ("e", values.astype(">f4"))):
        np.savez(tmp_path / f"{name}.npz", x=array, labels=np.zeros(4))
        signature = (Input(name="x", dtype=F32, shape=("n", 6)),)
        batches = read(tmp_path / f"{name}.npz", signature)
        held = batches.feeds[0].parts[0].arrays["x"]
        assert isinstance(held, arrays.Stored) is (name != "f")
        np.testing.assert_array_equal(next(iter(batches))["x"], values)
        picked = held[np.array([2, 3, 0, 0, 1])]
        np.testing.assert_array_equal(picked, values[[2, 3, 0, 0, 1]])
        assert len(held[np.arange(0)]) == 0
    np.savez_compressed(tmp_path / "z.npz", x=values)
    np.testing.assert_array_equal(batch(tmp_path / "z.npz", signature)["x"], values)
    np.savez(tmp_path / "p.npz", x=np.array([{}]))
    with pytest.raises(DataError, match="pickled"):
        read(tmp_path / "p.npz", signature)


# -------------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize(("module", "extra"), [("PIL", "images"), ("tokenizers", "text"), ("pyarrow", "datasets")])
def test_missing_packages_are_named_with_their_extra(tmp_path, monkeypatch, module, extra):
    samples.images(tmp_path / "images", 1)
    samples.text(tmp_path / "t.txt")
    samples.tokenizer(tmp_path / "t.json")
    samples.dataset(tmp_path / "datasets", {"input_ids": [[1, 2]]})
    monkeypatch.setitem(__import__("sys").modules, module, None)
    path, signature = (tmp_path / extra, NCHW) if extra == "images" else (tmp_path / "datasets", LM)
    choices = {}
    if extra == "text":
        path, choices = tmp_path / "t.txt", {"tokenizer": tmp_path / "t.json"}
    with pytest.raises(MissingExtraError, match=rf"pip install 'onnxgrail\[{extra}\]'"):
        read(path, signature, reading=Reading(**choices))


# ---------------------------------------------------------------------------------------------------------------- text


@pytest.fixture
def words(tmp_path):
    """A tokenizer of words: `w0` is 2, `w1` is 3 ..."""
    return samples.tokenizer(tmp_path / "t.json")


def test_lines_are_samples_where_there_is_a_mask(tmp_path, words):
    (tmp_path / "d.txt").write_text("w0 w1 w2\n\n  w3\r\nw4 w5 w6 w7 w8")
    made = batch(tmp_path / "d.txt", BERT, tokenizer=words)
    np.testing.assert_array_equal(made["input_ids"], [[2, 3, 4, 0, 0], [5, 0, 0, 0, 0], [6, 7, 8, 9, 10]])
    np.testing.assert_array_equal(made["attention_mask"], [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    short = batch(tmp_path / "d.txt", BERT, tokenizer=words, sequence_length=2)
    np.testing.assert_array_equal(short["input_ids"], [[2, 3], [5, 0], [6, 7]])


def test_lines_fill_a_fixed_length(tmp_path, words):
    (tmp_path / "d.txt").write_text("w0 w1 w2\nw3")
    fixed = tuple(Input(name=e.name, dtype=np.dtype(np.int32), shape=(2, 4)) for e in BERT)
    made = batch(tmp_path / "d.txt", fixed, tokenizer=words)
    np.testing.assert_array_equal(made["input_ids"], [[2, 3, 4, 0], [5, 0, 0, 0]])
    assert {array.dtype for array in made.values()} == {np.dtype(np.int32)}
    with pytest.raises(DataError, match=r"--sequence-length 9: the model takes input_ids int32\[2, 4\]"):
        read(tmp_path / "d.txt", fixed, reading=Reading(tokenizer=words, sequence_length=9))


def test_positions_and_types_of_text(tmp_path, words):
    (tmp_path / "d.txt").write_text("w0 w1 w2\nw3")
    more = tuple(Input(name=name, dtype=I64, shape=("b", "s")) for name in ("position_ids", "token_type_ids"))
    made = batch(tmp_path / "d.txt", BERT + more, tokenizer=words)
    np.testing.assert_array_equal(made["position_ids"], [[0, 1, 2], [0, 0, 0]])
    assert not made["token_type_ids"].any()


@pytest.mark.parametrize("letter", ["w", "ä", "語"])
def test_passages_have_no_padding_where_there_is_no_mask(tmp_path, letter):
    # Every word is longer than a byte, so most passages begin inside one.
    names = [f"{letter}{n}" for n in range(1000)]
    vocabulary = samples.tokenizer(tmp_path / "t.json", names)
    (tmp_path / "d.txt").write_text(" ".join(names), encoding="utf-8")
    batches = read(tmp_path / "d.txt", LM, batch_size=4, reading=Reading(tokenizer=vocabulary, sequence_length=20))
    made = np.concatenate([feed["input_ids"] for feed in batches])
    assert made.shape[0] > 30
    np.testing.assert_array_equal(np.diff(made, axis=1), np.ones((len(made), 19)))  # whole words, in their order
    assert made[0, 0] == 2
    assert len(np.unique(made[:, 0])) >= len(made) - 1  # the last one may have begun earlier to be long enough


def test_a_short_text_is_one_short_passage(tmp_path, words):
    (tmp_path / "d.txt").write_text("w0 w1 w2")
    np.testing.assert_array_equal(batch(tmp_path / "d.txt", LM, tokenizer=words)["input_ids"], [[2, 3, 4]])
    fixed = (Input(name="input_ids", dtype=I64, shape=("n", 4)),)
    with pytest.raises(DataError, match="got 3 tokens, the model takes input_ids"):
        read(tmp_path / "d.txt", fixed, reading=Reading(tokenizer=words))


@pytest.mark.parametrize("signature", [BERT, LM])
def test_the_mark_that_editors_put_first_is_no_text(tmp_path, words, signature):
    (tmp_path / "d.txt").write_text("w5 w6 w7\n", encoding="utf-8-sig")
    made = batch(tmp_path / "d.txt", signature, tokenizer=words)
    np.testing.assert_array_equal(made["input_ids"], [[7, 8, 9]])
    (tmp_path / "d.txt").write_text("", encoding="utf-8-sig")
    with pytest.raises(DataError, match="holds no text"):
        batch(tmp_path / "d.txt", signature, tokenizer=words)


def test_special_tokens_alone_are_no_text(tmp_path):
    from tokenizers import Tokenizer, processors

    letters = Tokenizer.from_file(str(samples.tokenizer(tmp_path / "t.json")))
    letters.post_processor = processors.TemplateProcessing(single="[PAD] $A", special_tokens=[("[PAD]", 0)])
    letters.save(str(tmp_path / "t.json"))
    (tmp_path / "blank.txt").write_text("\n \n\t\n")
    with pytest.raises(DataError, match="holds no text"):
        read(tmp_path / "blank.txt", LM, reading=Reading(tokenizer=tmp_path / "t.json"))


def test_text_that_is_too_long_for_the_model_says_how_to_cut_it(tmp_path, words):
    (tmp_path / "d.txt").write_text("w0 w1\n")
    batches = read(tmp_path / "d.txt", BERT, reading=Reading(tokenizer=words))
    with pytest.raises(ModelError, match=r"^broken\. If the texts .* --sequence-length N"), batches.advising():
        raise ModelError("broken")
    with pytest.raises(ModelError, match=r"^broken\. Mend it$"), batches.advising():
        raise ModelError("broken", hint="Mend it")


def test_text_that_cannot_be_read(tmp_path, words):
    (tmp_path / "d.txt").write_text("w0 w1")
    (tmp_path / "empty.txt").write_text(" \n\n")
    (tmp_path / "latin.txt").write_bytes("w0 ä w1\n".encode("latin-1") * 9)
    (tmp_path / "broken.json").write_text('{"model": ')
    table = tuple(Input(name=e.name, dtype=I64, shape=e.shape, rows=3) for e in BERT)
    for name, signature, tokenizer, message in [
        ("d.txt", BERT, None, "text needs a tokenizer. Give --tokenizer"),
        ("d.txt", BERT, tmp_path / "absent.json", "no tokenizer at"),
        ("d.txt", BERT, tmp_path / "broken.json", r"cannot read .*broken\.json"),
        ("d.txt", NCHW, words, "no input takes token ids; the model takes: x float32"),
        ("empty.txt", BERT, words, "holds no text"),
        ("empty.txt", LM, words, "holds no text"),
        ("latin.txt", BERT, words, r"latin\.txt' is not UTF-8, at byte 3\. Save it as UTF-8"),
        ("latin.txt", LM, words, r"latin\.txt' is not UTF-8, at byte 3\. Save it as UTF-8"),
        ("d.txt", table, words, "ids up to 3, the model's table has 3 rows. Take the tokenizer"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            read(tmp_path / name, signature, reading=Reading(tokenizer=tokenizer))
        assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------------------- Polygraphy


def test_polygraphy_inputs(tmp_path):
    feeds = [{"x": np.full((n, 3, 8, 8), n, np.float32)} for n in (1, 2)]
    samples.polygraphy(tmp_path / "d.json", feeds)
    found = list(read(tmp_path / "d.json", NCHW))
    for made, wanted in zip(found, feeds, strict=True):
        np.testing.assert_array_equal(made["x"], wanted["x"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"x": ', "cannot read"),
        ("{}", "is not a list of inputs"),
        ("[]", "is not a list of inputs"),
        ('[{"x": [1, 2]}]', "not an encoded array"),
        ('[{"x": {"array": "AAAA"}}]', "item 0, 'x'"),
        ('[{"x": {"array": "%"}}]', "item 0, 'x'"),
        ("[" * 100000, "cannot read"),
    ],
)
def test_broken_json_is_one_line(tmp_path, text, message):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / "d.json", NCHW)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_pickles_in_json_are_refused(tmp_path):
    samples.polygraphy(tmp_path / "d.json", [{"x": np.array([{}])}])
    with pytest.raises(DataError, match="pickled objects"):
        read(tmp_path / "d.json", NCHW)
