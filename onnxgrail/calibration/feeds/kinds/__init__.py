"""The kinds of calibration data: one entry each in `KINDS`, and a reader in a module beside it.

A new kind is a function from a path to parts, and its entry; the command's help and the documentation are held against
this list by tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onnxgrail.calibration.feeds.kinds import arrays, datasets, feeds, images, text
from onnxgrail.calibration.feeds.parts import Part
from onnxgrail.calibration.feeds.reading import Reading
from onnxgrail.calibration.feeds.signature import Signature
from onnxgrail.errors import DataError
from onnxgrail.machine.files.paths import Read
from onnxgrail.machine.scripts import is_named

Reader = Callable[[Path, Signature, Reading, int | None], tuple[Part, ...]]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of data.

    Attributes:
        name: what users call it.
        matches: whether a path is of this kind.
        read: path, the model's inputs, the user's choices and how many feeds to take at most, to parts.
        takes: the choices that matter to it, by their names in `Reading`.
        holds: tells of a path below a folder, seen from there, if that file is one of those that are read.
    """

    name: str
    matches: Callable[[Path], bool]
    read: Reader
    takes: frozenset[str] = frozenset()
    holds: Callable[[Path], bool] = lambda _: True


def _suffix(*names: str) -> Callable[[Path], bool]:
    return lambda path: path.is_file() and path.suffix.lower() in names


def _directly(*names: str) -> Callable[[Path], bool]:
    return lambda file: len(file.parts) == 1 and file.suffix in names


SCALE = frozenset({"image_mean", "image_std"})
TEXT = frozenset({"tokenizer", "sequence_length"})
# The first that matches reads, so of two kinds in one folder the earlier one.
KINDS = (
    Kind("file.py:function", lambda path: is_named(str(path)), feeds.from_function),
    Kind(".npz", _suffix(".npz"), arrays.from_npz),
    Kind(".npy", _suffix(".npy"), arrays.from_npy),
    Kind("Polygraphy .json", _suffix(".json"), feeds.from_polygraphy),
    Kind(".txt", _suffix(".txt"), text.from_text, TEXT),
    Kind("test_data_set_* folders (.pb)", feeds.has_protobufs, feeds.from_protobufs, holds=feeds.is_protobuf),
    Kind("a saved Hugging Face dataset", datasets.is_dataset, datasets.from_dataset, SCALE | TEXT),
    Kind("a folder of .npz or .npy", arrays.has_arrays, arrays.from_folder, holds=_directly(".npz", ".npy")),
    Kind("a folder of images", images.has_images, images.from_images, SCALE, holds=images.is_image),
)
MENU = ", ".join(kind.name for kind in KINDS[:-1]) + f" or {KINDS[-1].name}"


def read_parts(
    path: str | os.PathLike[str], signature: Signature, limit: int | None, reading: Reading
) -> tuple[Part, ...]:
    """The parts found at a path, in the order of their names.

    Args:
        path: a file, a folder, or `file.py:function`.
        signature: the model's inputs.
        limit: how many feeds to take from a function at most.
        reading: the user's choices.

    Raises:
        DataError: nothing there, not a known kind, unreadable, or names that are not the model's.
        MissingExtraError: this kind needs a package that is not installed.
        UsageError: a choice does nothing for this kind.
    """
    place = Path(path)
    kind = next((kind for kind in KINDS if kind.matches(place)), None)
    if kind is None:
        raise _unknown(place)
    reading.unused(kind.takes, kind.name)
    return kind.read(place, signature, reading, limit)


def reads(path: str | os.PathLike[str], what: str) -> Read:
    """What is read of calibration data, for `paths.check_targets`; `what` is how messages call them."""
    place = Path(path)
    if is_named(str(place)):
        return Read(path=Path(str(place).rpartition(":")[0]), what=what)
    kind = next((kind for kind in KINDS if kind.matches(place)), None)
    return Read(path=place, what=what) if kind is None else Read(path=place, what=what, holds=kind.holds)


def _unknown(place: Path) -> DataError:
    text, hint = str(place), f"Give {MENU}"
    if not place.exists():
        return DataError(f"no calibration data at {text!r}", hint=hint)
    if place.is_dir():
        return DataError(f"nothing to calibrate with in folder {text!r}", hint=hint)
    if place.suffix.lower() == ".py":
        wanted = f"Write {text}:function, which returns an iterable of dicts"
        return DataError(f"{text!r} names no function", hint=wanted)
    return DataError(
        f"calibration data {text!r}: the kind {place.suffix or 'without suffix'!r} is not known", hint=hint
    )
