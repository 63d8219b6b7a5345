"""The form of a kind of calibration data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from onnxgrail.calibration.feeds.parts import Part
from onnxgrail.calibration.feeds.reading import Reading
from onnxgrail.calibration.feeds.signature import Signature

Reader = Callable[[Path, Signature, Reading, int | None], tuple[Part, ...]]
SCALE = frozenset({"image_mean", "image_std", "image_form"})
TEXT = frozenset({"tokenizer", "sequence_length"})


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of data.

    Attributes:
        matches: returns True if a path is of this kind.
        read: reads parts from a path, the model's inputs, the user's settings and the maximum number of feeds.
        takes: settings that have an effect on it, by their names in `Reading`.
        holds: returns True for a path, relative to the folder, of a file that is read.
    """

    matches: Callable[[Path], bool]
    read: Reader
    takes: frozenset[str] = frozenset()
    holds: Callable[[Path], bool] = lambda _: True


def with_suffix(suffix: str) -> Callable[[Path], bool]:
    """Return a function that returns True for files of a suffix, in lower or upper case."""
    return lambda path: path.is_file() and path.suffix.lower() == suffix
