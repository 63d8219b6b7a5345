"""The interface of quantized weights: how their numbers are decoded, cut and encoded again.

Everything else sees such a weight as the float array that it represents.  Only the rewriter handles its parts: the
integers, scales and zero points of a DequantizeLinear, or the packed blocks of a MatMulNBits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from onnxgrail.core import Array, Bools, Floats, Ints

Load = Callable[[str], Array]
Keep = Mapping[int, Bools]


class Member(NamedTuple):
    """A stored array that a cut along an axis of the float array affects.

    Attributes:
        name: of the stored array.
        axis: its axis that is cut.
        positions: positions on that axis.
    """

    name: str
    axis: int
    positions: Ints


class Levels(NamedTuple):
    """The numbers that codes stand for, (code - zero) * scale, each part broadcast to the shape of the float array.

    Attributes:
        scale: not 0.
        zero: the code of 0.
        low, high: the smallest and the largest code.
    """

    scale: Floats
    zero: Floats
    low: Floats
    high: Floats

    def nearest(self, numbers: Floats, rows: int | slice = slice(None)) -> Floats:
        """Return the nearest numbers, of some rows; the parts have the shape of the whole array."""
        scale, zero = self.scale[rows], self.zero[rows]
        return np.asarray((np.clip(np.rint(numbers / scale + zero), self.low[rows], self.high[rows]) - zero) * scale)


class Stored(Protocol):
    """A quantized weight."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the float array."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the float array."""

    @property
    def bits(self) -> int:
        """Return the number of bits per number in the file."""

    @property
    def held(self) -> bool:
        """Return True if its parts are inputs of the node that outputs the float array, else of every reader."""

    def block(self, axis: int) -> int:
        """Return how many neighbors along an axis share a scale and are removed together; 1 if there is no block."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """Count the bytes, with scales and zero points, of an array of this shape stored the same way."""

    def decode(self, load: Load) -> Array:
        """Dequantize to the float array."""

    def cut(self, load: Load, keep: Keep, values: Array | None) -> dict[int, Array]:
        """Return the parts with only the kept positions, by operand position.

        Zero points do not change.  Scales do not change either, unless new numbers are out of range: then they grow
        just enough.

        Args:
            load: returns the array of a name.
            keep: axis of the float array -> mask of the kept positions.
            values: new numbers of full size; None to keep the stored ones.
        """

    def levels(self, load: Load, parts: Mapping[int, Array]) -> Levels:
        """Return the numbers that can be stored under the scales of parts, which `cut` made of full size."""

    def members(self, axis: int, positions: Ints) -> list[Member]:
        """Return the stored arrays that lose these positions, the one with the numbers first."""


def safe(scale: Floats) -> Floats:
    """Return scales to divide by: zeros are replaced by one."""
    return np.where(scale == 0, 1.0, scale)


def wanted(values: Floats, scale: Floats, low: Floats, high: Floats) -> Floats:
    """Return the scale that each value needs to be encoded in range; 0 if its current scale is large enough.

    Args:
        values: new numbers.
        scale: the scale of each; a negative one reverses the range.
        low: how far the codes reach below the zero point of each.
        high: how far the codes reach above it.
    """
    room = np.where((values > 0) == (scale >= 0), high, low)
    beyond = (np.abs(values) > 0) & (np.abs(values) >= np.abs(scale) * (room + 0.5)) & (room > 0)
    return np.where(beyond, np.abs(values) / np.where(beyond, room, 1.0), 0.0)


def raised(scale: Array, least: Floats) -> Array:
    """Return the scales, increased to at least these magnitudes, with their dtype and signs."""
    now = scale.astype(np.float64)
    return np.copysign(np.maximum(np.abs(now), least.reshape(now.shape)), now).astype(scale.dtype)


def kept(array: Array, keep: Keep) -> Array:
    """Return only the kept positions along every axis in `keep`."""
    for axis, mask in keep.items():
        array = np.compress(mask, array, axis=axis)
    return np.array(array, order="C")
