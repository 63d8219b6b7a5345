"""The result of a trace: blocks, refusals, and the positions of all channels that can be removed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from onnxgrail.core import Array, Block, Bools, Ints, Refusal
from onnxgrail.graph.rotate.marked import SECOND
from onnxgrail.graph.stored.integers import Stored
from onnxgrail.graph.stored.spread import Spread
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.labels import Mark


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A constant input of a node that loses positions.

    Attributes:
        param: key of its working array; value: name of the constant in the model.
        units: per axis the unit number of every position, 0 if it always stays.
        scaled: its numbers are divided by the root of the share of positions that are left, so that a root mean
            square over the channels that are left stands for one over all channels.
    """

    param: str
    value: str
    units: Mapping[int, Ints]
    scaled: bool = False

    def changes(self, dead: Bools) -> bool:
        """Return True if the constant loses positions when the dead units are removed."""
        return any(bool(dead[units].any()) for units in self.units.values())

    def left(self, shape: tuple[int, ...], dead: Bools) -> tuple[int, ...]:
        """Return the constant's shape without the dead units."""
        return tuple(
            int((~dead[self.units[axis]]).sum()) if axis in self.units else size for axis, size in enumerate(shape)
        )

    def narrowed(self, array: Array, dead: Bools) -> Array:
        """Return the constant without the positions of dead units."""
        for axis, numbers in self.units.items():
            kept = ~dead[numbers]
            if kept.all():
                continue
            array = np.compress(kept, array, axis=axis)
            if self.scaled:
                array = (array / np.sqrt(kept.mean())).astype(array.dtype)
        return np.array(array, order="C")


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """The form in which the narrowed file stores the constant of a working array.

    Attributes:
        operand: the constant that is cut; shape: its full shape.
        spread: the layout of a constant that repeats itself; None if all of its numbers are stored.
        picked: the full constant stays in the file, and a Gather node selects the kept positions.
        counted: its numbers count as parameters.
        bits: bits per number in the file.
        stored: the parts of a quantized weight; None for floats.
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
        """Count the parameters and bytes that are stored without the dead units."""
        shape = self.operand.left(self.shape, dead)
        if self.stored is not None:
            return math.prod(shape), self.stored.nbytes(shape)
        numbers = math.prod(shape) if self.spread is None else self.spread.left(dead)
        return numbers * self.counted, numbers * self.bits // 8


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Stored numbers that constants are made of.

    Attributes:
        name: of the value that holds them.
        numbers: how many count as parameters; bytes: size of all numbers.
        readers: working arrays of the operands that these numbers reach.
        fixed: other readers need these numbers too, so they stay.
    """

    name: str
    numbers: int
    bytes: int
    readers: frozenset[str]
    fixed: bool


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """Working arrays that are made of the same stored numbers, and these numbers."""

    forms: tuple[Form, ...]
    sources: tuple[Source, ...]

    def removed(self, dead: Bools) -> tuple[int, int]:
        """Count the parameters and bytes that the file loses without the dead units; negative if copies add more."""
        fresh = [form for form in self.forms if not form.picked and form.operand.changes(dead)]
        cut = {form.operand.param for form in fresh}
        gone = [source for source in self.sources if not source.fixed and source.readers <= cut]
        stored = [form.count(dead) for form in fresh]
        numbers = sum(source.numbers for source in gone) - sum(count for count, _ in stored)
        return numbers, sum(source.bytes for source in gone) - sum(size for _, size in stored)


@dataclass(frozen=True, slots=True, eq=False)
class Sizes:
    """Sizes that are computed from shapes, after narrowing.

    Attributes:
        right: node with a computed target shape -> mask of elements that are right without a correction.
        staying: outputs of Shape nodes that keep reporting full sizes when their tensor is narrowed.
    """

    right: Mapping[str, Bools] = field(default_factory=dict)
    staying: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """Everything that can be narrowed in a graph, and what cannot.

    Attributes:
        blocks: in topological order of their last consumer.
        refusals: channels that cannot be narrowed, with reasons.
        facts: shapes and values that the trace used.
        marks: unit numbers on the axes of activations; each mark has one axis.
        operands: (node key, input position) -> constant that is cut.
        ids: count of unit numbers, 0 included.
        sizes: sizes that are computed from shapes.
        holdings: how the file stores the operands.
        repeated: multiply-accumulates in node bodies that are not traced, as far as known.
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
        """Return the working arrays of constants whose stored form would grow if their numbers changed."""
        return frozenset(form.operand.param for held in self.holdings for form in held.forms if form.compact)

    def copied(self) -> frozenset[str]:
        """Return the working arrays whose numbers other readers need too, so that new ones are a copy."""
        return frozenset(
            form.operand.param
            for held in self.holdings
            for form in held.forms
            if any(source.fixed and source.numbers >= math.prod(form.shape) for source in held.sources)
        )

    def dead(self, units: Iterable[Ints]) -> Bools:
        """Return a mask (ids,) of these units as removed ones."""
        found = np.zeros(self.ids, dtype=bool)
        for ids in units:
            found[ids] = True
        return found

    def narrowed(self, widths: Mapping[str, int]) -> list[Block]:
        """Return the blocks that lose units with these widths; those without a width lose none."""
        return [block for block in self.blocks if widths.get(block.name, block.units) < block.units]

    def rotated(self, widths: Mapping[str, int]) -> bool:
        """Return True if a rotated stream or table loses channels with these widths, so that the rotation stays."""
        return any(block.ranked for block in self.narrowed(widths))

    def convolved(self, block: Block) -> bool:
        """Return True if 2-D convolutions produce or consume the channels of a block."""
        layers = (*block.producers, *block.consumers)  # a constant that is only added may have four axes, too
        return any(len(self.facts.shapes[slot.initializer]) == 4 for slot in layers)


def named_as(survey: Survey, other: Survey) -> Survey:
    """Return a trace with the names that its blocks have in another one: with other bases they are counted anew.

    Blocks of a kind are the same if the same weights make their channels, or read them. Two convolutions that were one
    count as one.
    """
    known = {place: block.name for block in other.blocks for place in _places(block)}
    taken = {block.name for block in other.blocks}
    names = []
    for block in survey.blocks:
        own = f"{block.name}.apart" if block.name in taken else block.name
        names.append(next((known[place] for place in _places(block) if place in known), own))
    blocks = tuple(replace(block, name=name) for block, name in zip(survey.blocks, names, strict=True))
    return replace(survey, blocks=blocks) if len({*names}) == len(names) else survey


def _places(block: Block) -> list[tuple[str, frozenset[tuple[str, int, bytes]]]]:
    """Return the kind of a block with positions in weights: those that make its channels, and those that read them."""
    sides = (
        frozenset((s.initializer.removesuffix(SECOND), s.axis, np.sort(s.index, axis=None).tobytes()) for s in side)
        for side in (block.producers, block.consumers)
    )
    return [(block.kind, side) for side in sides if side]


@dataclass(frozen=True, slots=True, eq=False)
class Ledger:
    """Pruning decisions so far, in the coordinates of the original model.

    Attributes:
        dead: (ids,) mask of removed units.
        arrays: param -> full-size array with new values at the kept positions; others keep the model's values.
        shifts: node -> full-size vector to add to the bias of its output.
    """

    dead: Bools
    arrays: Mapping[str, Array]
    shifts: Mapping[str, Array] = field(default_factory=dict)
