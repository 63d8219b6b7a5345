"""Weights dequantized by DequantizeLinear, or by Cast and Mul."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Floats, Ints
from onnxgrail.graph.stored.integers import Keep, Levels, Load, Member, kept, raised, safe, wanted

BYTE = 8  # bits


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """A weight (q - zero) * scale, of DequantizeLinear or Cast and Mul: one scale, or several along `axis`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    quantised: str
    scale: str
    zero: str
    axis: int
    size: int  # block size along the axis; 0 without blocks
    per_axis: bool
    named: str  # name of the initializer, or of the float array if the integers are computed
    bits: int = 8
    held: bool = True

    def block(self, axis: int) -> int:
        """Return the block size along an axis; see `Stored.block`."""
        return self.size if self.size and axis == self.axis else 1

    def nbytes(self, shape: Sequence[int]) -> int:
        """Count the bytes; see `Stored.nbytes`."""
        numbers, scales = math.prod(shape), 1
        if self.size:
            scales = math.prod(-(-n // self.size) if a == self.axis else n for a, n in enumerate(shape))
        elif self.per_axis:
            scales = shape[self.axis]
        zeros = scales if self.zero else 0
        return numbers * self.bits // BYTE + scales * self.dtype.itemsize + zeros * self.bits // BYTE

    def decode(self, load: Load) -> Array:
        """Dequantize; see `Stored.decode`."""
        q, scale, zero = self._parts(load)
        return ((q - zero) * scale).astype(self.dtype)

    def _parts(self, load: Load) -> tuple[Floats, Floats, Floats]:
        """Return integers, scales and zero points as floats that broadcast against each other."""
        q = load(self.quantised).astype(np.float64)
        zero = load(self.zero) if self.zero else np.zeros(())
        return q, self._spread(load(self.scale), self.shape), self._spread(zero, self.shape)

    def _spread(self, part: Array, shape: tuple[int, ...]) -> Floats:
        """Return a scale or zero point as floats that broadcast to `shape`: that of the numbers or of a cut."""
        part = part.astype(np.float64)
        if self._blocked(part):
            whole = np.repeat(part, self.size, axis=self.axis)
            return np.take(whole, np.arange(shape[self.axis]), axis=self.axis)
        if part.ndim and self.per_axis:
            return part.reshape([-1 if a == self.axis else 1 for a in range(len(shape))])
        return part.reshape(()) if part.size == 1 else part

    def _largest(self, numbers: Floats, scale: Array) -> Floats:
        """Return the largest number under each scale: the reverse of `_spread`."""
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
        """Return the parts of a cut; see `Stored.cut`."""
        parts = {0: kept(load(self.quantised), keep), 1: self._cut_scale(load(self.scale), keep)}
        if self.zero:
            parts[2] = self._cut_scale(load(self.zero), keep)
        if values is not None:
            new = kept(values, keep).astype(np.float64)
            zero, low, high = self._range(load, parts, new.shape)
            least = wanted(new, self._spread(parts[1], new.shape), zero - low, high - zero)
            parts[1] = raised(parts[1], self._largest(least, parts[1]))
            parts[0] = quantised(new / safe(self._spread(parts[1], new.shape)) + zero, parts[0].dtype)
        return parts

    def levels(self, load: Load, parts: Mapping[int, Array]) -> Levels:
        """Return the numbers that can be stored; see `Stored.levels`."""
        return Levels(safe(self._spread(parts[1], self.shape)), *self._range(load, parts, self.shape))

    def _range(self, load: Load, parts: Mapping[int, Array], shape: tuple[int, ...]) -> tuple[Floats, Floats, Floats]:
        """Return zero points, and the smallest and the largest code around each."""
        zero, far = self._spread(parts.get(2, np.zeros(())), shape), self._reach(load)
        low, high = limits(parts[0].dtype)
        return zero, np.maximum(low, zero - far), np.minimum(high, zero + far)

    def _reach(self, load: Load) -> float:
        """Return how far codes of new numbers may be from the zero point: 8-bit codes no further than the current ones.

        Quantization tools leave one bit unused for kernels that add two products in sixteen bits.
        """
        q, _, zero = self._parts(load)
        far = float(np.abs(q - zero).max(initial=0.0))
        return far if far and load(self.quantised).dtype.itemsize == 1 else np.inf

    def _cut_scale(self, part: Array, keep: Keep) -> Array:
        if self._blocked(part):
            return kept(part, {a: m[:: self.size] if a == self.axis else m for a, m in keep.items()})
        if part.ndim and self.per_axis and self.axis in keep:
            return np.compress(keep[self.axis], part, axis=0 if part.ndim == 1 else self.axis)
        return part

    def members(self, axis: int, positions: Ints) -> list[Member]:
        """Return the stored arrays that a cut affects; see `Stored.members`."""
        return [Member(self.named, axis, positions)]


def quantised(codes: Floats, dtype: np.dtype[Any]) -> Array:
    """Round codes to an integer (or narrow float) dtype, clamped to its range."""
    low, high = limits(dtype)
    whole = ir.DataType.from_numpy(dtype).is_integer()
    return np.clip(np.rint(codes) if whole else codes, low, high).astype(dtype)


def limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the smallest and largest value of a dtype; numpy does not know types below eight bits."""
    kind = ir.DataType.from_numpy(dtype)
    return float(kind.min), float(kind.max)
