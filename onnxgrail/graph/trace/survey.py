"""What a trace leaves behind: blocks, refusals, and where every narrowable position sits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from onnxgrail.core import Array, Block, Bools, Ints, Refusal
from onnxgrail.graph.stored.integers import Stored
from onnxgrail.graph.stored.spread import Spread
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.labels import Mark


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A constant input of one node that loses positions.

    Attributes:
        param: key of its working array; value: name of the constant in the model.
        units: per axis the unit number of every position, 0 where it always stays.
    """

    param: str
    value: str
    units: Mapping[int, Ints]

    def changes(self, dead: Bools) -> bool:
        """Return True if positions go when units go."""
        return any(bool(dead[units].any()) for units in self.units.values())

    def left(self, shape: tuple[int, ...], dead: Bools) -> tuple[int, ...]:
        """Return what is left of the constant's shape when units go."""
        return tuple(
            int((~dead[self.units[axis]]).sum()) if axis in self.units else size for axis, size in enumerate(shape)
        )

    def narrowed(self, array: Array, dead: Bools) -> Array:
        """Return the positions of the constant that stay when units go."""
        for axis, numbers in self.units.items():
            array = np.compress(~dead[numbers], array, axis=axis)
        return np.array(array, order="C")


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """How the narrowed file keeps the constant of one working array.

    Attributes:
        operand: what is cut; shape: of the constant in full.
        spread: the layout of a constant that repeats itself; None if all of its numbers are stored.
        picked: nothing new is stored, a node picks the positions that stay out of the full constant.
        counted: its numbers count as parameters.
        bits: of one number in the file.
        stored: of a weight that is kept as integers with scales.
    """

    operand: Operand
    shape: tuple[int, ...]
    spread: Spread | None
    picked: bool
    counted: bool
    bits: int
    stored: Stored | None

    @property
    def compact(self) -> bool:
        """Return True if the file holds fewer numbers than the constant has."""
        return self.spread is not None or self.picked or self.bits == 0

    def count(self, dead: Bools) -> tuple[int, int]:
        """Count the parameters and the bytes that are stored when units go."""
        shape = self.operand.left(self.shape, dead)
        if self.stored is not None:
            return self.stored.count(shape)
        numbers = math.prod(shape) if self.spread is None else self.spread.left(dead)
        return numbers * self.counted, numbers * self.bits // 8


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Numbers in the file that constants are made of.

    Attributes:
        numbers: that count as parameters; bytes: of all.
        readers: working arrays of the operands that these numbers reach.
        fixed: something else reads them too.
    """

    numbers: int
    bytes: int
    readers: frozenset[str]
    fixed: bool


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """Working arrays that are made of the same stored numbers, and these."""

    forms: tuple[Form, ...]
    sources: tuple[Source, ...]

    def removed(self, dead: Bools) -> tuple[int, int]:
        """Count the parameters and the bytes that the file loses when units go; copies may make it gain some."""
        fresh = [form for form in self.forms if not form.picked and form.operand.changes(dead)]
        cut = {form.operand.param for form in fresh}
        gone = [source for source in self.sources if not source.fixed and source.readers <= cut]
        stored = [form.count(dead) for form in fresh]
        numbers = sum(source.numbers for source in gone) - sum(count for count, _ in stored)
        return numbers, sum(source.bytes for source in gone) - sum(size for _, size in stored)


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """What becomes of sizes that are computed from shapes.

    Attributes:
        right: node with a computed target shape -> which of its elements come right by themselves.
        staying: outputs of Shape nodes that go on reporting full sizes when their tensor is narrowed.
    """

    right: Mapping[str, Bools] = field(default_factory=dict)
    staying: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """All that can be narrowed in a graph, and what cannot.

    Attributes:
        blocks: in topological order of their last consumer.
        refusals: families of channels that are left alone.
        facts: the run the trace rests on.
        marks: unit numbers on the axes of activations; every mark has one axis.
        operands: (node key, input position) -> constant that is cut.
        ids: how many unit numbers there are, 0 included.
        sizes: what is computed from shapes.
        holdings: what the file stores of the operands.
        repeated: multiply-accumulates in the bodies of nodes that are not entered, as far as they can be told.
    """

    blocks: tuple[Block, ...]
    refusals: tuple[Refusal, ...]
    facts: Facts
    marks: Mapping[str, tuple[Mark, ...]]
    operands: Mapping[tuple[str, int], Operand]
    ids: int
    sizes: Sizes = field(default_factory=Sizes)
    holdings: tuple[Holding, ...] = ()
    repeated: Mapping[str, int] = field(default_factory=dict)

    def compact(self) -> frozenset[str]:
        """Return the working arrays of constants that new numbers would make larger."""
        return frozenset(form.operand.param for held in self.holdings for form in held.forms if form.compact)

    def convolved(self, block: Block) -> bool:
        """Return True if convolutions over images make or read the channels of a block."""
        return any(len(self.facts.shapes[slot.initializer]) == 4 for slot in block.slots)


@dataclass(frozen=True, slots=True, eq=False)
class Ledger:
    """Decisions so far, all in original coordinates.

    Attributes:
        dead: (ids,) which units go.
        arrays: param -> full-size array with new values at the kept positions; a missing one keeps the model's values.
        shifts: node -> full-size vector to be added to the bias of its output.
    """

    dead: Bools
    arrays: Mapping[str, Array]
    shifts: Mapping[str, Array] = field(default_factory=dict)
