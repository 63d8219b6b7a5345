"""Quantized weights that are transposed after DequantizeLinear, as exporters write linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail.core import Array, Ints
from onnxgrail.graph.stored.integers import Keep, Levels, Load, Member, Stored


@dataclass(frozen=True, slots=True, eq=False)
class Turned:
    """A transposed quantized weight: axis `a` of the float array is axis `axes[a]` of `inside`."""

    inside: Stored
    axes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    bits: int
    held: bool

    def block(self, axis: int) -> int:
        """Return the block size along an axis; see `Stored.block`."""
        return self.inside.block(self.axes[axis])

    def nbytes(self, shape: Sequence[int]) -> int:
        """Count the bytes; see `Stored.nbytes`."""
        return self.inside.nbytes([shape[a] for a in np.argsort(self.axes)])

    def decode(self, load: Load) -> Array:
        """Dequantize; see `Stored.decode`."""
        return self.inside.decode(load).transpose(self.axes)

    def cut(self, load: Load, keep: Keep, values: Array | None) -> dict[int, Array]:
        """Return the parts of a cut; see `Stored.cut`."""
        back = None if values is None else values.transpose(np.argsort(self.axes))
        return self.inside.cut(load, {self.axes[a]: mask for a, mask in keep.items()}, back)

    def levels(self, load: Load, parts: Mapping[int, Array]) -> Levels:
        """Return the numbers that can be stored; see `Stored.levels`."""
        found = self.inside.levels(load, parts)
        return Levels(*(np.broadcast_to(part, self.inside.shape).transpose(self.axes) for part in found))

    def members(self, axis: int, positions: Ints) -> list[Member]:
        """Return the stored arrays that a cut affects; see `Stored.members`."""
        return self.inside.members(self.axes[axis], positions)


def turned(inside: Stored, axes: Sequence[int]) -> Turned:
    """Return a quantized weight with its axes in this order."""
    shape = tuple(inside.shape[a] for a in axes)
    return Turned(inside, tuple(axes), shape, inside.dtype, inside.bits, inside.held)
