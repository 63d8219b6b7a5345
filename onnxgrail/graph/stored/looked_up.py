"""Weights in 4 bits that lookups in a table of pairs turn into floats: `Cast`, `Gather`, `Mul` and `Reshape`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Floats, Ints
from onnxgrail.graph.attributes import input_of, integer, maker_of, numbers_of
from onnxgrail.graph.stored.integers import Keep, Levels, Load, Member, kept, raised, safe, wanted
from onnxgrail.graph.stored.packed import BYTE, packed_bits, unpacked

BITS, EACH = 4, 2  # per number; numbers per byte
LOW, HIGH = 2 ** (BITS - 1), 2 ** (BITS - 1) - 1  # how far codes reach below and above zero
CODES, SCALE, PLACES, TARGET = range(4)  # parts of a weight, as `cut` numbers them


class Parts(NamedTuple):
    """The constants that a weight is made of.

    Attributes:
        codes: bytes (outputs, ...), scale: (outputs, blocks, ...).
        places: the block of each byte of an output; None if the blocks are whole.
        target: the shape of the weight.
    """

    codes: ir.Value
    scale: ir.Value
    places: ir.Value | None
    target: ir.Value


def lookups_of(node: ir.Node) -> Parts | None:
    """Return the parts of a weight that this `Reshape` is the last node of; None for other nodes."""
    product = _maker(node, 0, "Reshape", "Mul")
    pairs = _maker(product, 0, "Mul", "Gather")
    cast, target = _maker(pairs, 1, "Gather", "Cast"), _constant(node, 1)
    table, codes = _constant(pairs, 0), _constant(cast, 0)
    picked = _maker(product, 1, "Mul", "Gather")
    scale = _constant(product, 1) if picked is None else _constant(picked, 0)
    places = None if picked is None else _constant(_maker(picked, 1, "Gather", "Cast"), 0)
    if target is None or table is None or codes is None or scale is None or (picked is None) != (places is None):
        return None
    if codes.dtype != ir.DataType.UINT8 or table.const_value is None or not is_pairs(table.const_value):
        return None
    parts = Parts(codes, scale, places, target)
    axes = [integer(one, "axis") for one in (pairs, picked) if one is not None]
    return parts if _fits(parts) and axes in ([0], [0, 1]) else None


def _fits(parts: Parts) -> bool:
    """Return True if the sizes are those of a weight (outputs, inputs, ...)."""
    held = [None if value is None else value.const_value for value in parts[:3]]
    codes, scale, places = (() if tensor is None else tensor.shape.numpy() for tensor in held)
    sizes = numbers_of(parts.target).tolist()
    if len(sizes) < 2 or min(sizes) < 1 or math.prod(codes) * EACH != math.prod(sizes) or codes[0] != sizes[0]:
        return False
    whole = len(codes) == 3 and scale == (*codes[:2], 1, 1)
    return whole if parts.places is None else scale[0] == codes[0] and (*codes[1:], 1) == places and len(scale) == 2


def pairs_of_a_byte() -> Array:
    """Return the two numbers in each byte, (256, 2), low bits first."""
    byte = np.arange(2**BYTE, dtype=np.uint8)[:, None]
    return unpacked(byte, BITS).astype(np.float32) - np.float32(LOW)


def is_pairs(tensor: ir.TensorProtocol) -> bool:
    """Return True for the table of the pairs in a byte, which is no embedding."""
    alike = tensor.dtype == ir.DataType.FLOAT and tensor.size == EACH * 2**BYTE
    return alike and np.array_equal(tensor.numpy(), pairs_of_a_byte())


def _maker(node: ir.Node | None, slot: int, op: str, made_by: str) -> ir.Node | None:
    """Return the node that makes an input of a node of this type, if it has the given type."""
    maker = maker_of(node, slot) if node is not None and node.op_type == op else None
    return maker if maker is not None and maker.op_type == made_by else None


def _constant(node: ir.Node | None, slot: int) -> ir.Value | None:
    """Return an input that is a stored constant."""
    value = input_of(node, slot) if node is not None else None
    fixed = value is not None and value.const_value is not None and value.producer() is None
    return value if value is not None and fixed and not value.is_graph_input() else None


@dataclass(frozen=True, slots=True, eq=False)
class LookedUp:
    """A weight (outputs, inputs, ...) in 4 bits, two numbers per byte along all axes but the first.

    The bytes of an output lie in blocks of equal size, each with a scale, until inputs are removed: then each byte
    names its block.  An odd number of taps ties the inputs in pairs, so that no byte is cut in two.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    codes: str
    scale: str
    places: str
    blocks: int
    named: str  # the float array
    bits: int = BITS
    held: bool = True

    @property
    def row(self) -> int:
        """Return the bytes of an output."""
        return math.prod(self.shape[1:]) // EACH

    def block(self, axis: int) -> int:
        """Return how many neighbors share a byte; see `Stored.block`."""
        return EACH if axis == 1 and math.prod(self.shape[2:]) % EACH else 1

    def nbytes(self, shape: Sequence[int]) -> int:
        """Count the bytes; see `Stored.nbytes`.  All scales of an output stay."""
        scales, row = shape[0] * self.blocks, math.prod(shape[1:]) // EACH
        named = row if self.places or row < self.row else 0
        return math.prod(shape) // EACH + scales * self.dtype.itemsize + named * self._kind().itemsize

    def _kind(self) -> np.dtype[Any]:
        return np.min_scalar_type(self.blocks - 1)

    def decode(self, load: Load) -> Array:
        """Dequantize; see `Stored.decode`."""
        levels = unpacked(load(self.codes).reshape(self.shape[0], -1), BITS).astype(np.float64) - LOW
        scale = load(self.scale).reshape(self.shape[0], -1).astype(np.float64)
        numbers: Array = levels * np.repeat(scale[:, self._places(load)], EACH, axis=1)
        return numbers.astype(self.dtype).reshape(self.shape)

    def _places(self, load: Load) -> Ints:
        """Return the block of each byte of an output, (row,)."""
        if self.places:
            return load(self.places).ravel().astype(np.int64)
        return np.repeat(np.arange(self.blocks), self.row // self.blocks)

    def cut(self, load: Load, keep: Keep, values: Array | None) -> dict[int, Array]:
        """Return the parts of a cut; see `Stored.cut`."""
        codes, scale, places = load(self.codes), load(self.scale), self._places(load)
        outputs = {axis: mask for axis, mask in keep.items() if axis == 0}
        parts = dict[int, Array]()
        if self.places or 1 in keep:
            left = np.repeat(keep.get(1, np.ones(self.shape[1], bool)), math.prod(self.shape[2:]))[::EACH]
            codes, scale = codes.reshape(len(codes), -1), scale.reshape(len(scale), -1)
            codes, places = codes[:, left], places[left]
            parts[PLACES] = places[:, None].astype(self._kind())
        parts[CODES] = kept(codes, outputs)
        parts[SCALE] = kept(scale, outputs)
        if values is not None:
            numbers = kept(values, keep)
            parts[CODES], parts[SCALE] = _encoded(numbers.reshape(len(numbers), -1), parts, places)
        sizes = [int(keep[axis].sum()) if axis in keep else size for axis, size in enumerate(self.shape)]
        return {**parts, TARGET: np.array(sizes, np.int64)}

    def levels(self, load: Load, parts: Mapping[int, Array]) -> Levels:
        """Return the numbers that can be stored; see `Stored.levels`."""
        scale = parts[SCALE].reshape(self.shape[0], -1).astype(np.float64)
        wide = np.repeat(scale[:, self._places(load)], EACH, axis=1).reshape(self.shape)
        return Levels(safe(wide), np.zeros(()), np.full((), -float(LOW)), np.full((), float(HIGH)))

    def members(self, axis: int, positions: Ints) -> list[Member]:
        """Return the stored arrays that a cut affects; see `Stored.members`."""
        return [Member(self.named, axis, positions)]


def _encoded(values: Array, parts: dict[int, Array], places: Ints) -> tuple[Array, Array]:
    """Return bytes and scales of new numbers (outputs, inputs) whose bytes lie in these blocks."""
    before, where = parts[SCALE], np.repeat(places, EACH)
    wide: Floats = before.reshape(len(values), -1).astype(np.float64)
    need = wanted(values.astype(np.float64), wide[:, where], np.full(values.shape, LOW), np.full(values.shape, HIGH))
    least = np.zeros_like(wide.T)
    np.maximum.at(least, where, need.T)
    fresh = raised(before, np.ascontiguousarray(least.T))
    levels = values / safe(fresh.reshape(wide.shape).astype(np.float64))[:, where]
    bytes_ = packed_bits(np.clip(np.rint(levels) + LOW, 0, LOW + HIGH).astype(np.uint8), BITS)
    return bytes_.reshape(parts[CODES].shape), fresh
