"""The cost of what bases add to a model, and of what stays out of it where that does not pay.

A stream or a table whose channels all stay needs no matrices, and a convolution stays one where two cost more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.core import Block, Bools, Ints
from onnxgrail.graph.attributes import maker_of, name_of
from onnxgrail.graph.cost import counting
from onnxgrail.graph.rotate.marked import BRIDGE, RANK, SECOND, is_cached
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.survey import Survey

ROUNDING = 1e-9  # relative difference of costs that are equal


@dataclass(frozen=True, slots=True, eq=False)
class Bridge:
    """A matrix that takes the change of a basis.

    Attributes:
        node: it multiplies by the matrix.
        nodes: those of all matrices of this basis, which stay or go together.
        aside: it stands between a cache and heads, and the file never has it.
    """

    node: ir.Node
    nodes: tuple[ir.Node, ...]
    aside: bool = False

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the name of the matrix."""
        return (name_of(self.node, 1),)

    def more(self, survey: Survey, counted: str, dead: Bools | None) -> int:
        """Return what it costs without the dead units where it is not needed, else 0; see `Pair.more`."""
        return _cost(self.node, survey, counted, dead) if self.shapes(survey, dead) else 0

    def shapes(self, survey: Survey, dead: Bools | None) -> tuple[tuple[int, ...], ...]:
        """Return the shape of the matrix where it is not needed, else none."""
        cut = (units for node in self.nodes for units in _units(node, survey))
        needed = not self.aside and dead is not None and any(dead[units].any() for units in cut)
        return () if needed else (counting.operand_shape(self.node, survey, dead, 1),)

    def left_out(self, sizes: Sequence[float]) -> float:
        """Return the bytes that are left out, given those of the weight by `shapes`."""
        return sum(sizes)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two convolutions that were one.

    Attributes:
        first, second: their nodes; one of them has a single tap.
        block: with the channels between them; None if they all stay.
    """

    first: ir.Node
    second: ir.Node
    block: Block | None

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """Return both nodes."""
        return self.first, self.second

    @property
    def taps(self) -> ir.Node:
        """Return the one with several taps."""
        return self.second if name_of(self.first, 1).endswith(SECOND) else self.first

    @property
    def basis(self) -> str:
        """Return the name of the basis of the channels between them."""
        return self.second.metadata_props[RANK]

    @property
    def weights(self) -> tuple[str, str, str]:
        """Return the names of the weights of both, and of the one that they were."""
        first, second = (name_of(node, 1) for node in self.nodes)
        return first, second, name_of(self.taps, 1)

    def more(self, survey: Survey, counted: str, dead: Bools | None) -> int:
        """Return what both cost more than the one that they were, without the dead units; 0 if they cost less.

        Args:
            survey: the trace of the model with both.
            counted: params, bytes or macs, of one run on the probe feed.
            dead: (ids,) mask of removed units; None for all.
        """
        return max(self.gain(survey, counted, dead), 0)

    def gain(self, survey: Survey, counted: str, dead: Bools | None) -> int:
        """Return what `more` does, but negative if both cost less."""
        _, second, one = (math.prod(shape) for shape in self.shapes(survey, dead))
        both = sum(_cost(node, survey, counted, dead) for node in self.nodes)
        return both - (one * _cost(self.second, survey, counted, dead) // max(second, 1))

    def shapes(self, survey: Survey, dead: Bools | None) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the weights, in the order of their names."""
        first, second = (counting.operand_shape(node, survey, dead, 1) for node in self.nodes)
        taps = [max(sizes) for sizes in zip(first[2:], second[2:], strict=True)]
        return first, second, (second[0], first[1], *taps)

    def left_out(self, sizes: Sequence[float]) -> float:
        """Return the bytes that both take more than the one, given those of all three; 0 if they take less."""
        first, second, one = sizes
        return max(first + second - one, 0.0)


Spare = Bridge | Pair


def spares(model: ir.Model, survey: Survey) -> Iterator[Spare]:
    """Yield the matrices of streams and tables, and the convolutions that became two."""
    blocks = {block.ranked: block for block in survey.blocks}
    bridges = _bridges(model)
    for node in model.graph:
        if is_cached(node) and node.op_type == "MatMul":
            yield Bridge(node, (node,), aside=True)
        if BRIDGE in node.metadata_props:
            yield Bridge(node, tuple(bridges[node.metadata_props[BRIDGE]]))
        if RANK in node.metadata_props:
            first = maker_of(node, 0)
            assert first is not None
            yield Pair(first, node, blocks.get(node.metadata_props[RANK]))


def needed(model: ir.Model, blocks: Iterable[Block]) -> set[str]:
    """Return the bases whose matrices hold channels of these blocks: without the matrix, these would not be blocks."""
    cut = {slot.initializer for block in blocks for slot in block.slots}
    return {basis for basis, nodes in _bridges(model).items() if any(name_of(node, 1) in cut for node in nodes)}


def _bridges(model: ir.Model) -> dict[str, list[ir.Node]]:
    found: dict[str, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        if BRIDGE in node.metadata_props:
            found[node.metadata_props[BRIDGE]].append(node)
    return found


def pairs_of(model: ir.Model, survey: Survey) -> list[Pair]:
    """Return the convolutions of a graph that became two."""
    return [one for one in spares(model, survey) if isinstance(one, Pair)]


def paying(
    model: ir.Model, survey: Survey, widths: Mapping[str, int], cost: Callable[[Mapping[str, int]], float]
) -> dict[str, int]:
    """Return widths at which blocks between two convolutions are whole where one of them costs no more."""
    units = {pair.block.name: pair.block.units for pair in pairs_of(model, survey) if pair.block is not None}
    narrow = {name: full for name, full in units.items() if widths.get(name, full) < full}
    both = cost(widths) * (1 + ROUNDING) if narrow else 0.0
    return {**widths, **{name: full for name, full in narrow.items() if cost({**widths, name: full}) <= both}}


def surplus(model: ir.Model, survey: Survey, counted: str, dead: Bools | None) -> int:
    """Return what a narrowed model costs more than without everything that does not pay."""
    return sum(
        one.more(survey, counted, dead) for one in spares(model, survey) if isinstance(one, Pair) or not one.aside
    )


def _units(node: ir.Node, survey: Survey) -> Iterable[Ints]:
    """Return the units on the axes of a matrix."""
    operand = survey.operands.get((key(node), 1))
    return [] if operand is None else operand.units.values()


def _cost(node: ir.Node, survey: Survey, counted: str, dead: Bools | None) -> int:
    """Return the cost of a layer without the dead units."""
    if counted == "macs":
        return counting.node_macs(node, survey, dead)
    size = math.prod(counting.operand_shape(node, survey, dead, 1))
    return size * (1 if counted == "params" else survey.facts.dtypes[name_of(node, 1)].itemsize)


def block_shares(survey: Survey, model: ir.Model) -> list[tuple[int, int]]:
    """Return what `counting.block_shares` does; two convolutions that were one hold no more than the one."""
    pairs = {pair.block.name: pair for pair in pairs_of(model, survey) if pair.block is not None}
    found = []
    for block, (params, macs) in zip(survey.blocks, counting.block_shares(survey, model), strict=True):
        pair = pairs.get(block.name)
        more = (0, 0) if pair is None else (pair.more(survey, "params", None), pair.more(survey, "macs", None))
        found.append((params - more[0], macs - more[1]))
    return found
