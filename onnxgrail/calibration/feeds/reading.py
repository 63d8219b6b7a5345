"""Settings for reading data: how many samples, and what the files do not contain."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from onnxgrail.errors import UsageError

Numbers = float | Sequence[float] | None
LONGEST = 2**31 - 1  # largest int32, the type of token counts
BYTES = 10  # a mean or a standard deviation above it is one of pixels in 0..255
TOKENIZER = "tokenizer.json"  # beside an exported model
LENGTH = 128  # default of tokens per sample if neither the model nor the user gives a length


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The number of samples that are taken, and their batches.

    Attributes:
        samples: number of samples; None for all that the data hold.
        batch_size: samples per feed if the model leaves it open.
        seed: seed of random samples.
        feeds: least number of feeds, smaller ones if there are few samples.
    """

    samples: int | None = None
    batch_size: int = 8
    seed: int = 0
    feeds: int = 1


ALL = Sampling()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The user's settings for reading data; None means not set.

    Attributes:
        tokenizer: a tokenizers JSON file, for text.
        sequence_length: maximum number of tokens per sample, for text.
        image_mean: subtracted from pixels in 0..1, one number or one per channel.
        image_std: divisor after that, one number or one per channel.
        image_form: `bgr`, and `pad` or `stretch` instead of cropping.
        shapes: sizes for inputs that leave them open; only images need them.
    """

    tokenizer: Path | None = None
    sequence_length: int | None = None
    image_mean: tuple[float, ...] | None = None
    image_std: tuple[float, ...] | None = None
    image_form: tuple[str, ...] | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            UsageError: a number is out of range.
        """
        if self.sequence_length is not None and not 1 <= self.sequence_length <= LONGEST:
            raise UsageError(f"sequence_length must be from 1 to {LONGEST}, got {self.sequence_length}")
        for words in (("rgb", "bgr"), ("crop", "pad", "stretch")):
            both = [word for word in words if word in (self.image_form or ())]
            if len(both) > 1:
                raise UsageError(f"image_form cannot be both {' and '.join(both)}", hint="Choose one of them")
        for name in ("image_mean", "image_std"):
            numbers = getattr(self, name)
            if numbers is not None and not numbers:
                raise UsageError(f"{name} holds no number")
            if numbers and max(numbers) > BYTES:
                told, divided = (", ".join(f"{number / of:.4g}" for number in numbers) for of in (1, 255))
                raise UsageError(f"{name} is for pixels in 0..1, got {told}", hint=f"Divide by 255: {divided}")
        if self.image_std is not None and any(not number > 0 for number in self.image_std):
            raise UsageError(f"image_std must be above 0, got {', '.join(map(str, self.image_std))}")

    def unused(self, taken: frozenset[str], what: str) -> None:
        """Check that no setting is given that has no effect on these data.

        Args:
            taken: names of the settings that have an effect.
            what: name of the data in the message.

        Raises:
            UsageError: a setting has no effect.
        """
        for entry in fields(self):
            if entry.name != "shapes" and entry.name not in taken and getattr(self, entry.name) is not None:
                raise UsageError(f"--{entry.name.replace('_', '-')} does nothing for {what}", hint="Leave it out")


def reading_of(
    *,
    tokenizer: str | os.PathLike[str] | None,
    sequence_length: int | None,
    image_mean: Numbers,
    image_std: Numbers,
    image_form: Sequence[str] | None,
    input_shapes: Mapping[str, tuple[int, ...]] | None,
) -> Reading:
    """Return the settings as a `Reading`, from values as users write them."""
    return Reading(
        tokenizer=None if tokenizer is None else Path(tokenizer),
        sequence_length=sequence_length,
        image_mean=numbers(image_mean),
        image_std=numbers(image_std),
        image_form=None if image_form is None else tuple(image_form),
        shapes=input_shapes or {},
    )


def tokenizer_file(place: Path) -> Path:
    """Return the file of a tokenizer that is given by its path, or by that of its folder."""
    return place / TOKENIZER if place.is_dir() else place


def numbers(value: Numbers) -> tuple[float, ...] | None:
    """Convert a number or several numbers to floats; None stays None."""
    if value is None:
        return None
    return (float(value),) if isinstance(value, int | float) else tuple(float(v) for v in value)
