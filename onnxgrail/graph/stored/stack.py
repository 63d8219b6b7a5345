"""Stacks of packed matrices, one for every expert, as QMoE reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxgrail.core import Array, Floats, Ints
from onnxgrail.graph.stored.integers import Keep, Load, Member, kept, raised, safe, wanted
from onnxgrail.graph.stored.packed import BYTE, packed_bits, unpacked


@dataclass(frozen=True, slots=True)
class Stack:
    """(E, R, C) numbers: along C `bits` bits each, low bits first; a row, or each `size` numbers of it, has a scale.

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
        """As `Stored.block`: whole bytes along the last axis, and whole blocks."""
        return (self.size or BYTE // self.bits) if axis == 2 else 1

    def count(self, shape: Sequence[int]) -> tuple[int, int]:
        """As `Stored.count`; zero points count as the bytes that they are packed into."""
        numbers, rows, blocks = math.prod(shape), math.prod(shape[:2]), -(-shape[2] // (self.size or shape[2]))
        packed = rows * -(-blocks * self.bits // BYTE) if self.size else shape[0] * -(-shape[1] * self.bits // BYTE)
        zeros = packed if self.zero else 0
        beside = rows * blocks * self.dtype.itemsize + zeros
        return numbers + rows * blocks + zeros, numbers * self.bits // BYTE + beside

    def decode(self, load: Load) -> Array:
        """As `Stored.decode`."""
        scale, zero = self._parts(load)
        codes = unpacked(load(self.packed), self.bits).astype(np.float64)
        return ((codes - self._wide(zero)) * self._wide(scale)).astype(self.dtype)

    def _wide(self, grid: Floats) -> Floats:
        """One number per scale as one per weight."""
        return np.repeat(grid, self.size or self.shape[2], axis=2)[..., : self.shape[2]]

    def _parts(self, load: Load) -> tuple[Floats, Floats]:
        """(E, R, blocks) scales and zero points."""
        scale = self._grid(load(self.scale)).astype(np.float64)
        zero = load(self.zero) if self.zero else None
        if zero is None:
            return scale, np.full(scale.shape, 2.0 ** (self.bits - 1))
        return scale, self._zeros(zero).astype(np.float64)

    def _grid(self, array: Array) -> Array:
        return array.reshape(*self.shape[:2], -1)

    def _zeros(self, zero: Array) -> Array:
        """Zero points, packed along the rows where a row has one, else along its blocks."""
        if zero.ndim == 2:
            return self._grid(unpacked(zero, self.bits)[:, : self.shape[1]])
        return unpacked(zero, self.bits)[..., : -(-self.shape[2] // self.size)]

    def cut(self, load: Load, keep: Keep, values: Array | None) -> dict[int, Array]:
        """As `Stored.cut`."""
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
        """What is kept where one position of the last axis stands for `step` of them; 0 for all of them."""
        return {a: mask if a != 2 else mask[::step] for a, mask in keep.items() if a != 2 or step}

    def _encoded(self, load: Load, values: Array) -> tuple[Array, Array]:
        """Packed codes and scales of new numbers."""
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

    def members(self, axis: int, positions: Ints) -> list[Member]:
        """As `Stored.members`."""
        if axis < 2:
            return [Member(self.packed, axis, positions), Member(self.scale, axis, positions)]
        packed = Member(self.packed, 2, np.unique(positions // (BYTE // self.bits)))
        return [packed, Member(self.scale, 2, np.unique(positions // self.size))] if self.size else [packed]
