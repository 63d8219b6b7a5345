"""Stacks of packed matrices, one per expert, as in QMoE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail.core import Array, Floats, Ints
from onnxgrail.graph.stored.integers import Keep, Levels, Load, Member, kept, raised, safe, wanted
from onnxgrail.graph.stored.packed import BYTE, packed_bits, unpacked


@dataclass(frozen=True, slots=True)
class Stack:
    """An (E, R, C) weight: `bits` bits per number along C, low bits first; one scale per row, or per `size` numbers.

    `places` are the inputs of the node that hold the numbers, the scales and the zero points.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    packed: str
    scale: str
    zero: str
    bits: int
    size: int
    places: tuple[int, int, int]
    held: bool = False

    def block(self, axis: int) -> int:
        """Return the block size along an axis, see `Stored.block`: a scale block or one byte along the last axis."""
        return (self.size or BYTE // self.bits) if axis == 2 else 1

    def nbytes(self, shape: Sequence[int]) -> int:
        """Count the bytes; see `Stored.nbytes`."""
        numbers, rows, blocks = math.prod(shape), math.prod(shape[:2]), -(-shape[2] // (self.size or shape[2]))
        packed = rows * -(-blocks * self.bits // BYTE) if self.size else shape[0] * -(-shape[1] * self.bits // BYTE)
        zeros = packed if self.zero else 0
        beside = rows * blocks * self.dtype.itemsize + zeros
        return numbers * self.bits // BYTE + beside

    def decode(self, load: Load) -> Array:
        """Dequantize; see `Stored.decode`."""
        scale, zero = self._parts(load)
        codes = unpacked(load(self.packed), self.bits).astype(np.float64)
        return ((codes - self._wide(zero)) * self._wide(scale)).astype(self.dtype)

    def _wide(self, grid: Floats) -> Floats:
        """Repeat numbers per scale to numbers per weight."""
        return np.repeat(grid, self.size or self.shape[2], axis=2)[..., : self.shape[2]]

    def _parts(self, load: Load) -> tuple[Floats, Floats]:
        """Return the scales and zero points, (E, R, blocks) each."""
        scale = self._grid(load(self.scale)).astype(np.float64)
        zero = load(self.zero) if self.zero else None
        if zero is None:
            return scale, np.full(scale.shape, 2.0 ** (self.bits - 1))
        return scale, self._zeros(zero).astype(np.float64)

    def _grid(self, array: Array) -> Array:
        return array.reshape(*self.shape[:2], -1)

    def _zeros(self, zero: Array) -> Array:
        """Unpack the zero points: packed along the rows if there is one per row, else along the blocks of a row."""
        if zero.ndim == 2:
            return self._grid(unpacked(zero, self.bits)[:, : self.shape[1]])
        return unpacked(zero, self.bits)[..., : -(-self.shape[2] // self.size)]

    def cut(self, load: Load, keep: Keep, values: Array | None) -> dict[int, Array]:
        """Return the parts of a cut; see `Stored.cut`."""
        packed, scale = load(self.packed), load(self.scale)
        if values is not None:
            packed, scale = self._encoded(load, values)
        bytes_, grid = (self._every(keep, step) for step in (BYTE // self.bits, self.size))
        cut_scale = kept(self._grid(scale), grid)
        parts = [kept(packed, bytes_), cut_scale.reshape(cut_scale.shape[: scale.ndim])]
        if self.zero:
            zero = load(self.zero)
            left = kept(self._zeros(zero), grid)
            parts.append(packed_bits(left[..., 0] if zero.ndim == 2 else left, self.bits))
        return dict(zip(self.places, parts, strict=False))

    def _every(self, keep: Keep, step: int) -> Keep:
        """Return the masks for an array with one position per `step` positions of the last axis; 0 if it has none."""
        return {a: mask if a != 2 else mask[::step] for a, mask in keep.items() if a != 2 or step}

    def _encoded(self, load: Load, values: Array) -> tuple[Array, Array]:
        """Return the packed codes and the scales of new numbers."""
        scale, zero = self._parts(load)
        high = 2**self.bits - 1
        wide = self._wide(zero)
        need = wanted(values.astype(np.float64), self._wide(scale), wide, high - wide)
        step = self.size or self.shape[2]
        least = np.maximum.reduceat(need, np.arange(0, self.shape[2], step), axis=2)
        before = load(self.scale)
        fresh = raised(self._grid(before), least).reshape(before.shape)
        codes = values / safe(self._wide(self._grid(fresh).astype(np.float64))) + wide
        return packed_bits(np.clip(np.rint(codes), 0, high).astype(np.uint8), self.bits), fresh

    def levels(self, load: Load, parts: Mapping[int, Array]) -> Levels:
        """Return the numbers that can be stored; see `Stored.levels`."""
        scale = self._wide(self._grid(parts[self.places[1]]).astype(np.float64))
        return Levels(safe(scale), self._wide(self._parts(load)[1]), np.zeros(()), np.full((), 2.0**self.bits - 1))

    def members(self, axis: int, positions: Ints) -> list[Member]:
        """Return the stored arrays that a cut affects; see `Stored.members`."""
        if axis < 2:
            return [Member(self.packed, axis, positions), Member(self.scale, axis, positions)]
        packed = Member(self.packed, 2, np.unique(positions // (BYTE // self.bits)))
        return [packed, Member(self.scale, 2, np.unique(positions // self.size))] if self.size else [packed]
