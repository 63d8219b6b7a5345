"""Readers of images: their form, scale and order of channels, and how they refuse what is broken."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from onnxgrail.calibration.feeds.kinds import images
from onnxgrail.calibration.feeds.reading import Reading
from onnxgrail.errors import DataError, UsageError
from tests.reading import read
from tests.unit import samples
from tests.unit.test_kinds import BERT, F32, I64, NCHW, U8, batch, picture


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
