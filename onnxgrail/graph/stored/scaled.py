"""Weights behind DequantizeLinear."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Floats, Ints
from onnxgrail.graph.stored.integers import Keep, Load, Member, kept, raised, safe, wanted

BYTE = 8  # bits


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

    def count(self, shape: Sequence[int]) -> tuple[int, int]:
        """As `Stored.count`."""
        numbers, scales = math.prod(shape), 1
        if self.size:
            scales = math.prod(-(-n // self.size) if a == self.axis else n for a, n in enumerate(shape))
        elif self.per_axis:
            scales = shape[self.axis]
        zeros = scales if self.zero else 0
        beside = scales * self.dtype.itemsize + zeros * self.bits // BYTE
        return numbers + scales + zeros, numbers * self.bits // BYTE + beside

    def decode(self, load: Load) -> Array:
        """As `Stored.decode`."""
        q, scale, zero = self._parts(load)
        return ((q - zero) * scale).astype(self.dtype)

    def _parts(self, load: Load) -> tuple[Floats, Floats, Floats]:
        """Integers, scales and zero points as floats that broadcast."""
        q = load(self.quantised).astype(np.float64)
        zero = load(self.zero) if self.zero else np.zeros(())
        return q, self._spread(load(self.scale), self.shape), self._spread(zero, self.shape)

    def _spread(self, part: Array, shape: tuple[int, ...]) -> Floats:
        """A scale or zero point as floats that broadcast to `shape`, which is that of the numbers or a cut of it."""
        part = part.astype(np.float64)
        if self._blocked(part):
            whole = np.repeat(part, self.size, axis=self.axis)
            return np.take(whole, np.arange(shape[self.axis]), axis=self.axis)
        if part.ndim == 1 and self.per_axis:
            return part.reshape([-1 if a == self.axis else 1 for a in range(len(shape))])
        return part.reshape(()) if part.size == 1 else part

    def _largest(self, numbers: Floats, scale: Array) -> Floats:
        """The largest number under each scale: the way back from `_spread`."""
        if self._blocked(scale):
            starts = np.arange(0, numbers.shape[self.axis], self.size)
            blocks: Floats = np.maximum.reduceat(numbers, starts, axis=self.axis)
            return blocks
        others = tuple(a for a in range(numbers.ndim) if a != self.axis or not self.per_axis)
        found: Floats = np.asarray(numbers.max(axis=others))
        return found

    def _blocked(self, part: Array) -> bool:
        return bool(self.size) and part.ndim == len(self.shape)

    def cut(self, load: Load, keep: Keep, values: Array | None) -> dict[int, Array]:
        """As `Stored.cut`."""
        parts = {0: kept(load(self.quantised), keep), 1: self._cut_scale(load(self.scale), keep)}
        if self.zero:
            parts[2] = self._cut_scale(load(self.zero), keep)
        if values is not None:
            new = kept(values, keep).astype(np.float64)
            zero = self._spread(parts.get(2, np.zeros(())), new.shape)
            low, high = limits(parts[0].dtype)
            far = self._reach(load)
            least = wanted(
                new, self._spread(parts[1], new.shape), np.minimum(zero - low, far), np.minimum(high - zero, far)
            )
            parts[1] = raised(parts[1], self._largest(least, parts[1]))
            parts[0] = quantised(new / safe(self._spread(parts[1], new.shape)) + zero, parts[0].dtype)
        return parts

    def _reach(self, load: Load) -> float:
        """How far from the zero point codes of new numbers may go: bytes no further than they do now.

        Quantisers leave one bit free for kernels that add two products in sixteen bits.
        """
        q, _, zero = self._parts(load)
        far = float(np.abs(q - zero).max(initial=0.0))
        return far if far and load(self.quantised).dtype.itemsize == 1 else np.inf

    def _cut_scale(self, part: Array, keep: Keep) -> Array:
        if self._blocked(part):
            return kept(part, {a: m[:: self.size] if a == self.axis else m for a, m in keep.items()})
        if part.ndim and self.per_axis and self.axis in keep:
            return np.compress(keep[self.axis], part)
        return part

    def members(self, axis: int, positions: Ints) -> list[Member]:
        """As `Stored.members`."""
        return [Member(self.named, axis, positions)]


def quantised(codes: Floats, dtype: np.dtype[Any]) -> Array:
    """Codes in an integer (or narrow float) type: to the nearest, clamped to its range."""
    low, high = limits(dtype)
    whole = ir.DataType.from_numpy(dtype).is_integer()
    return np.clip(np.rint(codes) if whole else codes, low, high).astype(dtype)


def limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Smallest and largest value; numpy itself does not know the types below eight bits."""
    kind = ir.DataType.from_numpy(dtype)
    return float(kind.min), float(kind.max)
