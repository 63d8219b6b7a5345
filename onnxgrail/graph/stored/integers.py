"""Weights that the file keeps as integers with scales: what their numbers are, and how they are cut and written back.

A *stored* weight is seen by everything else as the float array that it stands for.  Only the rewriter asks for its
parts: the integers, scales and zero points of a DequantizeLinear, or the packed blocks of a MatMulNBits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from onnxgrail.core import Array, Bools, Floats, Ints

Load = Callable[[str], Array]
Keep = Mapping[int, Bools]


class Member(NamedTuple):
    """One stored array that a cut along an axis of the float array reaches: its name, its axis, positions there."""

    name: str
    axis: int
    positions: Ints


class Stored(Protocol):
    """What every kind of stored weight knows."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the float array."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the float array."""

    @property
    def bits(self) -> int:
        """Of one number in the file."""

    @property
    def held(self) -> bool:
        """Whether its parts are inputs of the node that makes the float array (else of every node that reads it)."""

    def block(self, axis: int) -> int:
        """How many neighbours along an axis share a scale and must go together; 1 where each can go alone."""

    def count(self, shape: Sequence[int]) -> tuple[int, int]:
        """Count the numbers and bytes of an array of this shape that is stored alike, scales and zero points too."""

    def decode(self, load: Load) -> Array:
        """The float array."""

    def cut(self, load: Load, keep: Keep, values: Array | None) -> dict[int, Array]:
        """Operand position -> part, with only the kept positions; `values` are new numbers of full size.

        Zero points stay; a scale stays too, unless new numbers are out of its range: then it grows just enough.
        """

    def members(self, axis: int, positions: Ints) -> list[Member]:
        """Stored arrays that lose these positions, the one with the numbers first."""


def safe(scale: Floats) -> Floats:
    """Scales to divide by."""
    return np.where(scale == 0, 1.0, scale)


def wanted(values: Floats, scale: Floats, low: Floats, high: Floats) -> Floats:
    """Size of the scale that each value needs to get a code in range; 0 where the one it has will do.

    Args:
        values: new numbers.
        scale: the scale of each; a negative one turns the range around.
        low: how far the codes reach below the zero point of each.
        high: how far above.
    """
    room = np.where((values > 0) == (scale >= 0), high, low)
    beyond = (np.abs(values) > 0) & (np.abs(values) >= np.abs(scale) * (room + 0.5)) & (room > 0)
    return np.where(beyond, np.abs(values) / np.where(beyond, room, 1.0), 0.0)


def raised(scale: Array, least: Floats) -> Array:
    """Scales of at least these sizes, with the type and signs they have."""
    now = scale.astype(np.float64)
    return np.copysign(np.maximum(np.abs(now), least.reshape(now.shape)), now).astype(scale.dtype)


def kept(array: Array, keep: Keep) -> Array:
    """Only the kept positions of every axis named."""
    for axis, mask in keep.items():
        array = np.compress(mask, array, axis=axis)
    return np.array(array, order="C")
