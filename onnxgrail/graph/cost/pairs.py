"""Convolutions that became two: they stay one where that costs less."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.core import Bools
from onnxgrail.graph.attributes import name_of
from onnxgrail.graph.cost import counting
from onnxgrail.graph.rotate.marked import RANK
from onnxgrail.graph.trace.facts import key
from onnxgrail.graph.trace.survey import Survey


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two convolutions that were one.

    Attributes:
        first, second: their nodes; one of them has a single tap.
        block: name of the block between them, '' if there is none.
    """

    first: ir.Node
    second: ir.Node
    block: str

    @property
    def taps(self) -> ir.Node:
        """Return the one with several taps."""
        return self.first if name_of(self.first, 1) == self.weight else self.second

    @property
    def weight(self) -> str:
        """Return the weight of the convolution that they were."""
        return self.second.metadata_props[RANK]

    def more(self, survey: Survey, counted: str, dead: Bools | None) -> int:
        """Return what both cost more than the one that they were, without the dead units; negative if they cost less.

        Args:
            survey: the trace of the model with both.
            counted: params, bytes or macs, of one run on the probe feed.
            dead: (ids,) mask of removed units; None for all.
        """
        first, second = (counting.operand_shape(node, survey, dead, 1) for node in (self.first, self.second))
        sizes = math.prod(first), math.prod(second)
        each = [self._each(survey, counted, node) for node in (self.first, self.second)]
        one = sizes[0] * sizes[1] // max(first[0], 1) ** 2
        return sizes[0] * each[0] + sizes[1] * each[1] - one * each[1]

    def _each(self, survey: Survey, counted: str, node: ir.Node) -> int:
        """Return what each number of a weight costs: multiply-accumulates, one per position of the output."""
        if counted == "macs":
            shape = survey.facts.shapes[key(node)]
            return math.prod(shape) // max(shape[1], 1)
        value = node.inputs[1]
        assert value is not None
        return 1 if counted == "params" else survey.facts.dtypes[value.name or ""].itemsize


def pairs_of(model: ir.Model, survey: Survey) -> list[Pair]:
    """Return the convolutions of a graph that became two."""
    names = {block.ranked: block.name for block in survey.blocks}
    found = []
    for node in model.graph:
        if RANK in node.metadata_props:
            first = node.inputs[0].producer() if node.inputs[0] is not None else None
            assert first is not None
            found.append(Pair(first, node, names.get(node.metadata_props[RANK], "")))
    return found


def surplus(model: ir.Model, survey: Survey, counted: str, dead: Bools | None) -> int:
    """Return what a model costs more than with one convolution for two wherever that costs less."""
    return sum(max(pair.more(survey, counted, dead), 0) for pair in pairs_of(model, survey))
