"""What a trace leaves behind: blocks, refusals, and where every narrowable position sits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxgrail.core import Array, Block, Bools, Ints, Refusal
from onnxgrail.graph.facts import Facts
from onnxgrail.graph.labels import Mark


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
    """

    blocks: tuple[Block, ...]
    refusals: tuple[Refusal, ...]
    facts: Facts
    marks: Mapping[str, tuple[Mark, ...]]
    operands: Mapping[tuple[str, int], Operand]
    ids: int
    sizes: Sizes = field(default_factory=Sizes)


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
