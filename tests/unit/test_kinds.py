"""Readers of images, text, Polygraphy files and saved data sets, and how they refuse what is broken."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from onnxgrail.calibration.feeds.kinds import arrays, images
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


@pytest.mark.parametrize(
    ("shape", "dtype", "wanted"),
    [
        (("n", 3, 8, 8), F32, (4, 3, 8, 8)),
        (("n", 8, 8, 3), F32, (4, 8, 8, 3)),
        (("n", 1, 8, 6), F32, (4, 1, 8, 6)),
        (("n", 5, 8, 1), np.dtype(np.float16), (4, 5, 8, 1)),
        (("n", 3, 8, 8), U8, (4, 3, 8, 8)),
        (("n", "c", "h", "w"), F32, (4, 3, 224, 224)),
    ],
)
def test_images_take_the_shape_of_the_input(tmp_path, shape, dtype, wanted):
    samples.images(tmp_path, 4)
    made = batch(tmp_path, picture(shape, dtype))["x"]
    assert (made.shape, made.dtype) == (wanted, dtype)
    assert made.max() > (100 if dtype == U8 else 0.5)
    assert made.max() <= (255 if dtype == U8 else 1)


def test_open_sizes_of_images_can_be_given(tmp_path):
    samples.images(tmp_path, 1)
    assert batch(tmp_path, picture(("n", 3, "h", "w")), shapes={"x": (1, 3, 10, 12)})["x"].shape == (1, 3, 10, 12)


def test_images_are_scaled_cut_and_normalised(tmp_path):
    # Three fields side by side, as high as one of them: only the one in the middle stays.
    fields = np.zeros((16, 48, 3), np.uint8)
    fields[:, 16:32] = (255, 51, 0)
    fields[:, :16] = fields[:, 32:] = 90
    Image.fromarray(fields).save(tmp_path / "a.png")
    made = batch(tmp_path, NCHW, image_mean=(0.5, 0.2, 0.0), image_std=(0.5, 1.0, 2.0))["x"]
    np.testing.assert_allclose(made[0, :, 3:5, 3:5], np.broadcast_to([[[1]], [[0]], [[0]]], (3, 2, 2)), atol=1e-6)
    assert not np.allclose(made[0, 1], made[0, 0])


def test_images_are_padded_stretched_and_turned_to_bgr(tmp_path):
    # A field twice as wide as high: red on the left, blue on the right.
    fields = np.zeros((16, 32, 3), np.uint8)
    fields[:, :16, 0] = fields[:, 16:, 2] = 255
    Image.fromarray(fields).save(tmp_path / "a.png")
    byte = picture(("n", 3, 8, 8), U8)
    padded = batch(tmp_path, byte, image_form=("pad",))["x"][0]
    np.testing.assert_array_equal(padded[:, :2], np.full((3, 2, 8), 114))
    np.testing.assert_array_equal(padded[:, 6:], np.full((3, 2, 8), 114))
    np.testing.assert_array_equal(padded[:, 2:6, 0], np.broadcast_to([[255], [0], [0]], (3, 4)))
    np.testing.assert_array_equal(padded[:, 2:6, 7], np.broadcast_to([[0], [0], [255]], (3, 4)))
    stretched = batch(tmp_path, byte, image_form=("stretch",))["x"][0]
    np.testing.assert_array_equal(stretched[:, :, 0], np.broadcast_to([[255], [0], [0]], (3, 8)))
    np.testing.assert_array_equal(stretched[:, :, 7], np.broadcast_to([[0], [0], [255]], (3, 8)))
    turned = batch(tmp_path, byte, image_form=("bgr", "pad"))["x"][0]
    np.testing.assert_array_equal(turned, padded[::-1])
    scales = {"image_mean": (0.0, 0.0, 1.0), "image_form": ("bgr", "stretch")}
    np.testing.assert_allclose(batch(tmp_path, NCHW, **scales)["x"][0, :, 0, 0], (0, 0, 0))  # of channels as they come
    tall = np.zeros((30, 2, 3), np.uint8)
    Image.fromarray(tall).save(tmp_path / "a.png")
    narrow = batch(tmp_path, byte, image_form=("pad",))["x"][0]
    assert (narrow == 0).all(axis=(0, 1)).sum() == 1  # a column at least


def test_images_are_found_in_classes_and_decoded_per_batch(tmp_path, monkeypatch):
    samples.images(tmp_path / "b", 3)
    samples.images(tmp_path / "a", 3)
    (tmp_path / "notes.md").write_text("no image")
    (tmp_path / "a" / "._0.png").write_text("what a Mac leaves behind")
    batches = read(tmp_path, NCHW, batch_size=2)
    assert batches.samples == 6
    opened = []
    monkeypatch.setattr(images, "_pixels", lambda file, _: opened.append(file.name) or np.zeros((8, 8, 3), np.uint8))
    next(iter(batches))
    assert opened == ["0.png", "1.png"]


@pytest.mark.parametrize(
    ("signature", "choices", "message"),
    [
        (picture(("n", 12)), {}, "need an input of four axes. The model takes: x float32.n, 12."),
        (picture(("n", 4, 8, 8)), {}, "1 or 3 channels"),
        (picture(("n", 3, 8, 8), I64), {}, "feed floats or uint8"),
        (BERT, {}, "images feed one input, the model takes 2: input_ids int64.batch, sequence.; attention_mask"),
        (NCHW, {"image_mean": (0.1, 0.2)}, "--image-mean has 2 numbers"),
        (picture(("n", 3, 8, 8), U8), {"image_std": (2.0,)}, "do nothing for an input of uint8"),
        (NCHW, {"image_form": ("pad", "stretch")}, "cannot be both pad and stretch"),
        (NCHW, {"image_form": ("bgr", "rgb")}, "cannot be both rgb and bgr"),
        (picture(("n", 1, 8, 8)), {"image_form": ("bgr",)}, "bgr does nothing for images of one channel"),
        (NCHW, {"tokenizer": "t.json"}, "--tokenizer does nothing for a folder of images"),
    ],
)
def test_images_that_do_not_fit(tmp_path, signature, choices, message):
    samples.images(tmp_path, 1)
    with pytest.raises((DataError, UsageError), match=message):
        read(tmp_path, signature, reading=Reading(**choices))


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_images_are_turned_as_the_camera_noted(tmp_path, suffix):
    shades = np.zeros((16, 16, 3), np.uint8)
    shades[:8, :8] = 255  # upper left; turned by a quarter to the right it is upper right
    note = Image.Exif()
    note[0x0112] = 6
    Image.fromarray(shades).save(tmp_path / f"a.{suffix}", exif=note)
    made = batch(tmp_path, NCHW)["x"][0, 0]
    assert [made[1, 1] > 0.5, made[1, 6] > 0.5, made[6, 1] > 0.5] == [False, True, False]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "RGBA", "CMYK", "P"])
def test_images_of_any_mode_are_read_without_a_word(tmp_path, mode, recwarn):
    grey = Image.fromarray(np.full((9, 9, 3), 255, np.uint8)).convert(mode)
    options = {"transparency": bytes(range(256))} if mode == "P" else {}  # of which pillow warns
    grey.save(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png"), **options)
    Image.new("RGB", (9, 9), "white").save(tmp_path / "b.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12\0\3")
    np.testing.assert_array_less(0.98, batch(tmp_path, NCHW)["x"])
    assert not recwarn.list


def test_broken_images_are_named(tmp_path):
    samples.images(tmp_path, 2)
    whole = (tmp_path / "1.png").read_bytes()
    (tmp_path / "1.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cannot read .*1\.png"):
        read(tmp_path, NCHW)
    (tmp_path / "1.png").write_text("no image")
    with pytest.raises(DataError, match=r"cannot read .*1\.png"):
        read(tmp_path, NCHW)
    Image.fromarray(np.full((9, 9), 60000, np.uint16)).save(tmp_path / "1.png")
    with pytest.raises(DataError, match="more than 8 bits"):
        read(tmp_path, NCHW)


def test_images_that_would_fill_memory_are_refused(tmp_path, monkeypatch):
    samples.images(tmp_path, 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(DataError, match="DecompressionBomb"):
        read(tmp_path, NCHW)


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
