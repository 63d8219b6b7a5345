"""Readers of folders of images: decoded, scaled, and cropped or padded, batch by batch."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxgrail.calibration.feeds.kinds.kind import SCALE, Kind
from onnxgrail.calibration.feeds.parts import Column, Part, natural, readable
from onnxgrail.calibration.feeds.reading import Reading
from onnxgrail.calibration.feeds.signature import Input, Signature, describe
from onnxgrail.core import Array, Ints, Labels
from onnxgrail.errors import DataError, UsageError
from onnxgrail.graph.slots import is_float
from onnxgrail.machine.extras import extra

SIZE = 224  # height and width if the model leaves them open
SHOWN = 3  # classes that a note names
MODES = {1: "L", 3: "RGB"}
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
# Excludes formats that run other programs (EPS) and rare formats.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
GRAY = 114  # of padding, as YOLO models are trained
IMAGENET = "0.485,0.456,0.406 and 0.229,0.224,0.225"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The form of decoded images: sizes, position of the channel axis, scaling of values, and words for the rest."""

    height: int
    width: int
    channels: int
    last: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: np.dtype[Any]
    form: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one sample."""
        sizes = self.height, self.width
        return (*sizes, self.channels) if self.last else (self.channels, *sizes)


def has_images(folder: Path) -> bool:
    """Return True if a folder contains an image at any depth."""
    return folder.is_dir() and any(is_image(f) for f in folder.rglob("*"))


def is_image(file: Path) -> bool:
    """Return True if a file has the suffix of an image; hidden files, which systems create, do not count."""
    return file.suffix.lower() in SUFFIXES and not file.name.startswith(".")


def from_images(folder: Path, signature: Signature, reading: Reading, _: int | None) -> tuple[Part, ...]:
    """Read every image below a folder, in the order of their names.

    Raises:
        DataError: the model has no input for images.
        MissingExtraError: pillow is not installed.
    """
    files = [f for f in folder.rglob("*") if is_image(f) and f.is_file()]
    files.sort(key=lambda f: [natural(Path(name)) for name in f.relative_to(folder).parts])
    if len(signature) != 1:
        raise DataError(
            f"{folder.name}: images feed one input, the model takes {len(signature)}: {describe(signature)}",
            hint="Give file.py:function",
        )
    column, notes = images(files.__getitem__, len(files), signature[0], reading, folder.name)
    labels, told = _classes([f.relative_to(folder).parts for f in files])
    return (Part(source=folder.name, arrays={signature[0].name: column}, notes=(*notes, *told), labels=labels),)


def _classes(names: Sequence[tuple[str, ...]]) -> tuple[Labels | None, tuple[str, ...]]:
    """Return classes of images in a folder per class, numbered by the sorted folder names, and a note that says so."""
    folders = sorted({parts[0] for parts in names})
    if len(folders) < 2 or any(len(parts) == 1 for parts in names):
        return None, ()
    numbers = {name: number for number, name in enumerate(folders)}
    more = ", ..." if len(folders) > SHOWN else ""
    told = ", ".join(f"{number} {name}" for name, number in [*numbers.items()][:SHOWN])
    labels = Labels(values=np.array([numbers[parts[0]] for parts in names], np.int64), classes=len(folders))
    return labels, (f"a folder is a class: {told}{more}",)


def images(
    take: Callable[[int], Path | bytes], count: int, entry: Input, reading: Reading, source: str
) -> tuple[Images, tuple[str, ...]]:
    """Return images for an input, and notes on assumptions about it.

    Args:
        take: returns the file or the encoded bytes of an image, by number.
        count: number of images.
        entry: the input.
        reading: the user's settings.
        source: name of the data in messages.
    """
    library()
    layout, notes = _layout(entry, reading, source)
    return Images(take, count, layout, source), notes


def library() -> Any:
    """Import and return pillow's `Image`.

    Raises:
        MissingExtraError: pillow is not installed.
    """
    extra("PIL", "images", "images need pillow")
    from PIL import Image

    return Image


def _layout(entry: Input, reading: Reading, source: str) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout of images for this input, from its shape and dtype, and notes on assumptions.

    Raises:
        DataError: no image has this shape or dtype.
        UsageError: a mean or std has neither one number nor one per channel.
    """
    takes, notes = f"The model takes: {entry}", []
    shape = reading.shapes.get(entry.name, entry.shape)
    if shape is None or len(shape) != 4:
        raise DataError(f"{source}: images need an input of four axes", hint=takes)
    last = shape[1] not in MODES and shape[3] in MODES
    channels, height, width = (shape[3], shape[1], shape[2]) if last else (shape[1], shape[2], shape[3])
    if isinstance(channels, int) and channels not in MODES:
        raise DataError(f"{source}: images have 1 or 3 channels, first or last", hint=takes)
    if not isinstance(channels, int):
        channels = 3
        notes.append(f"{source}: the model does not say how many channels images have, taken 3, first")
    form = reading.image_form or ()
    if "bgr" in form and channels == 1:
        raise UsageError("--image-form bgr does nothing for images of one channel", hint="Leave it out")
    if not (isinstance(height, int) and isinstance(width, int)):
        height, width = (size if isinstance(size, int) else SIZE for size in (height, width))
        notes.append(f"{source}: images are cut to {height} x {width}; --input-shapes sets another size")
    if entry.dtype != np.uint8 and not is_float(entry.dtype):
        raise DataError(f"{source}: images feed floats or uint8, input {entry.name!r} is {entry.dtype}", hint=takes)
    given = reading.image_mean is not None or reading.image_std is not None
    if entry.dtype == np.uint8 and given:
        raise UsageError("--image-mean and --image-std do nothing for an input of uint8", hint="Leave them out")
    if entry.dtype != np.uint8 and not given:
        notes.append(
            f"{source}: pixels scaled to 0..1; --image-mean and --image-std set what the model was trained with "
            f"(ImageNet: {IMAGENET})"
        )
    mean, std = reading.image_mean or (0.0,), reading.image_std or (1.0,)
    for name, numbers in (("--image-mean", mean), ("--image-std", std)):
        if len(numbers) not in (1, channels):
            raise UsageError(f"{name} has {len(numbers)} numbers, images of this model have {channels} channels")
    sizes = {"height": height, "width": width, "channels": channels}
    return Layout(**sizes, last=last, mean=mean, std=std, dtype=entry.dtype, form=form), tuple(notes)


class Images(Column):
    """Images by number, decoded when a batch needs them."""

    def __init__(self, take: Callable[[int], Path | bytes], count: int, layout: Layout, source: str) -> None:
        self.take, self.layout, self.source = take, layout, source
        super().__init__((count, *layout.shape), layout.dtype)

    def rows(self, numbers: Ints) -> Array:
        """Decode the images with these numbers."""
        batch = np.empty((len(numbers), *self.layout.shape), self.dtype)
        for place, number in enumerate(numbers):
            batch[place] = self._one(int(number))
        return batch

    def _one(self, number: int) -> Array:
        file = self.take(number)
        with readable(file if isinstance(file, Path) else f"{self.source}, image {number}"):
            pixels = _pixels(file, self.layout)
        if self.dtype != np.uint8:
            mean, std = (np.asarray(numbers, np.float32) for numbers in (self.layout.mean, self.layout.std))
            pixels = ((pixels.astype(np.float32) / 255 - mean) / std).astype(self.dtype)
        return pixels if self.layout.last else pixels.transpose(2, 0, 1)


def _pixels(file: Path | bytes, layout: Layout) -> Array:
    """Return an image as bytes (height, width, channels): scaled to cover the target size and center-cropped.

    With `pad` in the form, it is scaled to fit and centered on gray; with `stretch`, it is scaled to the target size.

    Raises:
        DataError: it has more than eight bits per channel.
    """
    library_ = library()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pillow's warnings about odd files that it can read
        warnings.simplefilter("error", library_.DecompressionBombWarning)
        with library_.open(file if isinstance(file, Path) else io.BytesIO(file), formats=FORMATS) as image:
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{str(file)!r} has more than 8 bits per channel", hint="Convert it to 8 bits")
            plain = _upright(image).convert(MODES[layout.channels])
    height, width = _scaled(plain.height, plain.width, layout)
    if (height, width) != (plain.height, plain.width):
        plain = plain.resize((width, height), library_.Resampling.BILINEAR)
    top, left = int((height - layout.height) / 2), int((width - layout.width) / 2)  # negative where gray is added
    whole = library_.new(plain.mode, (layout.width, layout.height), (GRAY,) * layout.channels)
    whole.paste(plain, (-left, -top))
    pixels = np.asarray(whole, np.uint8).reshape(layout.height, layout.width, layout.channels)
    return pixels[..., ::-1] if "bgr" in layout.form else pixels


def _scaled(height: int, width: int, layout: Layout) -> tuple[int, int]:
    """Return the size to which an image of some height and width is scaled."""
    if "stretch" in layout.form:
        return layout.height, layout.width
    scales = layout.height / height, layout.width / width
    if "pad" in layout.form:
        scale = min(scales)
        return min(layout.height, max(1, round(scale * height))), min(layout.width, max(1, round(scale * width)))
    return max(layout.height, round(max(scales) * height)), max(layout.width, round(max(scales) * width))


def _upright(image: Any) -> Any:
    """Return an image rotated as its EXIF data say; broken EXIF data are ignored."""
    from PIL import ImageOps

    with contextlib.suppress(Exception):  # EXIF readers raise any type; broken pixels raise again later
        return ImageOps.exif_transpose(image)
    return image


IMAGES = Kind(has_images, from_images, SCALE, holds=is_image)
