"""Weights behind DequantizeLinear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail.core import Array, Floats, Ints
from onnxgrail.graph.stored import Keep, Load, Member, kept, safe


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """(q - zero) * scale, as DequantizeLinear has it: per tensor, per channel or per block along `axis`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    quantised: str
    scale: str
    zero: str
    axis: int
    size: int  # block size along the axis; 0 where blocks are not used
    per_axis: bool
    named: str  # an initializer's name, or the float array's where the integers are computed
    bits: int = 8
    held: bool = True

    def block(self, axis: int) -> int:
        """As `Stored.block`."""
        return self.size if self.size and axis == self.axis else 1

    def decode(self, load: Load) -> Array:
        """As `Stored.decode`."""
        q, scale, zero = self._parts(load)
        return ((q - zero) * scale).astype(self.dtype)

    def _parts(self, load: Load) -> tuple[Floats, Floats, Floats]:
        """Integers, scales and zero points as floats that broadcast."""
        q = load(self.quantised).astype(np.float64)
        zero = load(self.zero) if self.zero else np.zeros(())
        return q, self._spread(load(self.scale).astype(np.float64)), self._spread(zero.astype(np.float64))

    def _spread(self, part: Floats) -> Floats:
        if self.size and part.ndim == len(self.shape):
            whole = np.repeat(part, self.size, axis=self.axis)
            return np.take(whole, np.arange(self.shape[self.axis]), axis=self.axis)
        if part.ndim == 1 and self.per_axis:
            return part.reshape([-1 if a == self.axis else 1 for a in range(len(self.shape))])
        return part.reshape(()) if part.size == 1 else part

    def cut(self, load: Load, keep: Keep, values: Array | None) -> dict[int, Array]:
        """As `Stored.cut`."""
        q = load(self.quantised)
        if values is not None:
            _, scale, zero = self._parts(load)
            q = quantised(values / safe(scale) + zero, q.dtype)
        parts = {0: kept(q, keep)}
        for operand, name in ((1, self.scale), (2, self.zero)):
            if name and load(name).ndim:
                parts[operand] = self._cut_scale(load(name), keep)
        return parts

    def _cut_scale(self, part: Array, keep: Keep) -> Array:
        if self.size and part.ndim == len(self.shape):
            return kept(part, {a: m[:: self.size] if a == self.axis else m for a, m in keep.items()})
        if self.per_axis and self.axis in keep:
            return np.compress(keep[self.axis], part)
        return part

    def members(self, axis: int, positions: Ints) -> list[Member]:
        """As `Stored.members`."""
        return [Member(self.named, axis, positions)]


def quantised(codes: Floats, dtype: np.dtype[Any]) -> Array:
    """Codes in an integer (or narrow float) type: to the nearest, clamped to its range."""
    if not _is_integer(dtype):
        return codes.astype(dtype)
    low, high = _range(dtype)
    return np.clip(np.rint(codes), low, high).astype(dtype)


def _is_integer(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iu" or dtype.name.startswith(("int", "uint"))


def _range(dtype: np.dtype[Any]) -> tuple[int, int]:
    """Smallest and largest value; numpy itself does not know the types below eight bits."""
    bits = int("".join(c for c in dtype.name if c.isdigit()))
    return (0, 2**bits - 1) if dtype.name.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
