"""The kinds of calibration data: an entry each in `KINDS`, with a reader in a module of this folder.

A new kind needs a function from a path to parts, and an entry. Tests compare the command's help and the documentation
with this list.
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
    """A kind of data.

    Attributes:
        name: its name in messages and help.
        matches: returns True if a path is of this kind.
        read: reads parts from a path, the model's inputs, the user's settings and the maximum number of feeds.
        takes: settings that have an effect on it, by their names in `Reading`.
        holds: returns True for a path, relative to the folder, of a file that is read.
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
# The first match reads, so the order decides if a folder holds two kinds.
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
    """Read the parts at a path, in the order of their names.

    Args:
        path: a file, a folder, or `file.py:function`.
        signature: the model's inputs.
        limit: maximum number of feeds to take from a function.
        reading: the user's settings.

    Raises:
        DataError: there are no data, the kind is unknown, data are unreadable, or names are not the model's.
        MissingExtraError: this kind needs a package that is not installed.
        UsageError: a setting has no effect on this kind.
    """
    place = Path(path)
    kind = next((kind for kind in KINDS if kind.matches(place)), None)
    if kind is None:
        raise _unknown(place)
    reading.unused(kind.takes, kind.name)
    return kind.read(place, signature, reading, limit)


def reads(path: str | os.PathLike[str], what: str) -> Read:
    """Return the files that calibration data read, for `paths.check_targets`; `what` names them in messages."""
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
