"""Compute the exact cost of block widths, fast enough for thousands of queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import onnx_ir as ir

from onnxgrail.core import Block, Bools, Ints
from onnxgrail.graph.cost import counting
from onnxgrail.graph.cost.spare import Spare, spares
from onnxgrail.graph.rewrite.unique import origin
from onnxgrail.graph.trace.survey import Holding, Survey

Counted = Literal["params", "macs", "bytes"]
Shapes = tuple[tuple[int, ...], ...]
Size = Callable[[tuple[int, ...]], float]
"""Returns the bytes of a weight of some shape."""
WHOLE: Mapping[str, Size] = MappingProxyType({})
REMEMBERED, MANY = 4096, 2**17  # most sums, and most parts in another form, to remember


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a model's cost.

    Attributes:
        blocks: numbers of the blocks that affect it, counted from 1 as in `counting.owners`.
        saved: its savings as a function of the mask of removed units.
        weights: names of the stored values that it consists of if the file may hold them in another form.
        shapes: of these values, as a function of the mask.
        resized: its savings, given the bytes of these values, now and with all units.
    """

    blocks: tuple[int, ...]
    saved: Callable[[Bools], float]
    weights: tuple[str, ...] = ()
    shapes: Callable[[Bools], Shapes] = lambda _: ()
    resized: Callable[[Sequence[float], Sequence[float]], float] = lambda now, whole: sum(whole) - sum(now)


class Meter:
    """The savings of block widths, in any unit.

    A weight or node depends only on the widths of the few blocks that cut it, so its savings are computed once per
    combination of these widths; blocks that share a weight are counted together.
    """

    def __init__(self, survey: Survey, parts: Sequence[Part]) -> None:
        self._survey = survey
        self._number = {block.name: number for number, block in enumerate(survey.blocks, start=1)}
        self._parts = parts
        self._of: dict[int, list[int]] = {number: [] for number in self._number.values()}
        for place, part in enumerate(self._parts):
            for number in part.blocks:
                self._of[number].append(place)
        self._known: dict[tuple[int, tuple[int, ...]], tuple[float, Shapes]] = {}
        self._sums: dict[tuple[int, ...], float] = {}
        self._resized: dict[tuple[int, tuple[int, ...], tuple[Size, ...]], float] = {}

    def saved(self, widths: Mapping[str, int], sizes: Mapping[str, Size] = WHOLE) -> float:
        """Return the savings of all blocks.

        Args:
            widths: block name -> kept units; blocks that are not named keep all.
            sizes: by the name of a stored value, its bytes if the file holds it in another form.
        """
        numbers = self._numbers(widths)
        if not sizes:
            return self._sum(tuple(numbers))
        whole = self._numbers({})
        return sum(self._sized(place, numbers, whole, sizes) for place in range(len(self._parts)))

    def near(self, block: Block, kept: int, widths: Mapping[str, int]) -> float:
        """Return the savings in the weights and nodes of one block.

        Args:
            block: the block.
            kept: the units that it keeps.
            widths: block name -> kept units of the other blocks.
        """
        number = self._number[block.name]
        numbers = self._numbers(widths)
        numbers[number] = kept
        return sum(self._found(place, numbers)[0] for place in self._of[number])

    def _numbers(self, widths: Mapping[str, int]) -> list[int]:
        return [0, *(widths.get(block.name, block.units) for block in self._survey.blocks)]

    def _sum(self, numbers: tuple[int, ...]) -> float:
        """Return the savings of all parts; a search for widths asks most of its questions many times."""
        found = self._sums.get(numbers)
        if found is None:
            if len(self._sums) >= REMEMBERED:
                self._sums.clear()
            found = self._sums[numbers] = sum([self._found(place, numbers)[0] for place in range(len(self._parts))])
        return found

    def _sized(self, place: int, kept: Sequence[int], full: Sequence[int], sizes: Mapping[str, Size]) -> float:
        """Return the savings of a part that the file may hold in another form."""
        part = self._parts[place]
        if not part.weights or any(name not in sizes for name in part.weights):
            return self._found(place, kept)[0]
        forms = tuple([sizes[name] for name in part.weights])
        key = (place, tuple([kept[number] for number in part.blocks]), forms)
        if key not in self._resized:
            if len(self._resized) >= MANY:
                self._resized.clear()
            shapes = (self._found(place, numbers)[1] for numbers in (kept, full))
            now, whole = ([form(shape) for form, shape in zip(forms, some, strict=False)] for some in shapes)
            self._resized[key] = part.resized(now, whole)
        return self._resized[key]

    def _found(self, place: int, kept: Sequence[int]) -> tuple[float, Shapes]:
        """Return the savings of a part, and the shapes of its weights."""
        part = self._parts[place]
        key = (place, tuple([kept[number] for number in part.blocks]))
        found = self._known.get(key)
        if found is None:
            dead = self._survey.dead(self._survey.blocks[n - 1].ids[kept[n] :] for n in part.blocks)
            found = self._known[key] = part.saved(dead), part.shapes(dead)
        return found


def meter_of(model: ir.Model, survey: Survey, counted: Counted) -> Meter:
    """Return the meter of parameters, multiply-accumulates or bytes."""
    owner = counting.owners(survey)
    parts = _nodes(model, survey, owner) if counted == "macs" else _weights(survey, owner, counted)
    return Meter(survey, [*parts, *(_spare(one, survey, owner, counted) for one in spares(model, survey))])


def dead_of(survey: Survey, widths: Mapping[str, int]) -> Bools:
    """Return a mask of removed units that gives blocks these widths; units of one block cost the same."""
    return survey.dead(block.ids[widths.get(block.name, block.units) :] for block in survey.blocks)


def _spare(one: Spare, survey: Survey, owner: Ints, counted: Counted) -> Part:
    """Return what is saved where a matrix, or the second one of two convolutions, is left out."""
    units = [labels for node in one.nodes for labels in counting.units_of(node, survey)]
    return Part(
        blocks=tuple(sorted(counting.owned(owner, units))),
        saved=lambda dead: one.more(survey, counted, dead),
        weights=tuple(map(origin, one.weights)) if counted == "bytes" else (),
        shapes=lambda dead: one.shapes(survey, dead),
        resized=lambda now, _: one.left_out(now),
    )


def _weights(survey: Survey, owner: Ints, counted: Counted) -> list[Part]:
    place = 0 if counted == "params" else 1

    def part(holding: Holding) -> Part:
        blocks = tuple(sorted(counting.owned(owner, counting.units_in(holding))))
        if len(holding.sources) > 1 or len({form.shape for form in holding.forms}) > 1:
            return Part(blocks, lambda dead: holding.removed(dead)[place])
        form = holding.forms[0]
        return Part(
            blocks=blocks,
            saved=lambda dead: holding.removed(dead)[place],
            weights=(origin(holding.sources[0].name),),
            shapes=lambda dead: (form.operand.left(form.shape, dead),),
        )

    return [part(holding) for holding in survey.holdings]


def _nodes(model: ir.Model, survey: Survey, owner: Ints) -> list[Part]:
    def part(node: ir.Node, blocks: set[int]) -> Part:
        full = counting.node_macs(node, survey, None)
        return Part(tuple(sorted(blocks)), lambda dead: full - counting.node_macs(node, survey, dead))

    touched = ((node, counting.owned(owner, counting.units_of(node, survey))) for node in model.graph)
    return [part(node, blocks) for node, blocks in touched if blocks]
