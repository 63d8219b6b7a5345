"""Weights packed into blocks of a few bits per number, as in MatMulNBits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail.core import Array, Floats, Ints
from onnxgrail.graph.stored.integers import Keep, Levels, Load, Member, kept, raised, safe, wanted

BYTE = 8
BITS = (2, 4, 8)  # bit widths whose numbers do not cross byte boundaries


@dataclass(frozen=True, slots=True)
class Packed:
    """An (N, K) weight of a MatMulNBits: `size` numbers along K share a scale; `bits` bits each, low bits first."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    packed: str
    scale: str
    zero: str
    bits: int
    size: int
    flat: bool  # scales are one-dimensional, without a block axis
    held: bool = False
    fractions: bool = False  # zero points are floats, one per block

    @property
    def blocks(self) -> int:
        """Return the number of blocks per row."""
        return -(-self.shape[1] // self.size)

    def block(self, axis: int) -> int:
        """Return the block size along an axis; see `Stored.block`."""
        return self.size if axis == 1 else 1

    def nbytes(self, shape: Sequence[int]) -> int:
        """Count the bytes; see `Stored.nbytes`."""
        rows, blocks = shape[0], -(-shape[1] // self.size)
        scales = rows * blocks
        zeros = scales if self.fractions else rows * -(-blocks * self.bits // BYTE) if self.zero else 0
        packed = scales * self.size * self.bits // BYTE
        floats = scales + zeros if self.fractions else scales
        return packed + floats * self.dtype.itemsize + (0 if self.fractions else zeros)

    def decode(self, load: Load) -> Array:
        """Dequantize; see `Stored.decode`."""
        codes = unpacked(load(self.packed), self.bits)[..., : self.size].astype(np.float64)
        scale, zero = self._parts(load)
        numbers = (codes - zero[..., None]) * scale[..., None]
        return numbers.reshape(self.shape[0], -1)[:, : self.shape[1]].astype(self.dtype)

    def _parts(self, load: Load) -> tuple[Floats, Floats]:
        """Return the scales and zero points, (N, blocks) each."""
        grid = (self.shape[0], self.blocks)
        scale = load(self.scale).reshape(grid).astype(np.float64)
        if not self.zero:
            return scale, np.full(grid, 2.0 ** (self.bits - 1))
        return scale, self._zeros(load(self.zero)).astype(np.float64)

    def _zeros(self, zero: Array) -> Array:
        if zero.dtype != np.uint8:
            return zero.reshape(self.shape[0], self.blocks)
        return unpacked(zero.reshape(self.shape[0], -1), self.bits)[:, : self.blocks]

    def cut(self, load: Load, keep: Keep, values: Array | None) -> dict[int, Array]:
        """Return the parts of a cut; see `Stored.cut`."""
        packed, scale = load(self.packed), load(self.scale)
        if values is not None:
            packed, scale = self._encoded(load, values)
        grid = {a: m[:: self.size] if a == 1 else m for a, m in keep.items()}
        cut_scale = kept(scale.reshape(self.shape[0], self.blocks), grid)
        parts = {1: kept(packed, grid), 2: cut_scale.ravel() if self.flat else cut_scale}
        if self.zero:
            parts[3] = self._cut_zero(load(self.zero), grid)
        return parts

    def _cut_zero(self, zero: Array, grid: Keep) -> Array:
        left = kept(self._zeros(zero), grid)
        if zero.dtype == np.uint8:
            left = packed_bits(left, self.bits)
        return left.ravel() if zero.ndim == 1 else left

    def _encoded(self, load: Load, values: Array) -> tuple[Array, Array]:
        """Return the packed codes and the scales of new numbers.

        A block of zeros gets the scale 0: with a fractional zero point, no code represents 0.
        """
        scale, zero = self._parts(load)
        padded = np.zeros((self.shape[0], self.blocks * self.size))
        padded[:, : self.shape[1]] = values
        blocks = padded.reshape(*scale.shape, self.size)
        high = 2**self.bits - 1
        least = wanted(blocks, scale[..., None], zero[..., None], high - zero[..., None]).max(axis=-1)
        fresh = np.where(blocks.any(axis=-1), raised(load(self.scale).reshape(scale.shape), least), 0)
        fresh = fresh.astype(load(self.scale).dtype)
        codes = blocks / safe(fresh.astype(np.float64))[..., None] + zero[..., None]
        return packed_bits(np.clip(np.rint(codes), 0, high).astype(np.uint8), self.bits), fresh

    def levels(self, load: Load, parts: Mapping[int, Array]) -> Levels:
        """Return the numbers that can be stored; see `Stored.levels`."""
        scale, zero = parts[2].reshape(self.shape[0], self.blocks).astype(np.float64), self._parts(load)[1]
        wide, middle = (np.repeat(one, self.size, axis=1)[:, : self.shape[1]] for one in (safe(scale), zero))
        return Levels(wide, middle, np.zeros(()), np.full((), 2.0**self.bits - 1))

    def members(self, axis: int, positions: Ints) -> list[Member]:
        """Return the stored arrays that a cut affects; see `Stored.members`."""
        if axis == 0:
            return [Member(self.packed, 0, positions), Member(self.scale, 0, self._flat_rows(positions))]
        blocks = np.unique(positions // self.size)
        return [Member(self.packed, 1, blocks), Member(self.scale, *self._flat_blocks(blocks))]

    def _flat_rows(self, rows: Ints) -> Ints:
        return (rows[:, None] * self.blocks + np.arange(self.blocks)).ravel() if self.flat else rows

    def _flat_blocks(self, blocks: Ints) -> tuple[int, Ints]:
        if not self.flat:
            return 1, blocks
        return 0, np.sort((np.arange(self.shape[0])[:, None] * self.blocks + blocks).ravel())


def unpacked(data: Array, bits: int) -> Array:
    """Unpack the codes of a byte array, low bits first; the last axis grows by 8 / bits."""
    shifts = np.arange(0, BYTE, bits, dtype=np.uint8)
    codes = (data[..., None] >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*data.shape[:-1], -1)


def packed_bits(codes: Array, bits: int) -> Array:
    """Pack codes into bytes, low bits first; the last byte is padded with zeros."""
    each = BYTE // bits
    missing = -codes.shape[-1] % each
    filled = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    groups = filled.reshape(*codes.shape[:-1], -1, each).astype(np.uint8)
    shifts = np.arange(0, BYTE, bits, dtype=np.uint8)
    joined: Array = np.bitwise_or.reduce(groups << shifts, axis=-1)
    return joined.astype(np.uint8)
