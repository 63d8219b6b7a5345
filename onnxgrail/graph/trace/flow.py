"""The state of one trace, and the view of it that an op rule gets.

Rules never touch the union-find or each other: they read marks and constants of a node's inputs through a `Site`, state
what is tied or frozen, which constants carry the channels, and emit marks for the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Ints, Kind, Refusal, Role
from onnxgrail.graph import slots
from onnxgrail.graph.stored.integers import Stored
from onnxgrail.graph.trace.causes import TIED
from onnxgrail.graph.trace.facts import Facts, key
from onnxgrail.graph.trace.labels import Labels, Mark

ONE = "there is only one channel, and one must stay"


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One constant operand that carries channels.

    Attributes:
        node: key of the node; operand: position among its inputs; value: name of the constant.
        mark: labels in the constant's own coordinates.
        role: as in `core.Slot`.
        source: for a consumer, the activation it contracts and that activation's channel axis.
        inside: where that activation is inside a fused node, as `core.Probe` has it; `source` is then its input.
    """

    node: str
    operand: int
    value: str
    mark: Mark
    role: Role
    source: tuple[str, int] | None = None
    inside: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Flow:
    """Everything a trace has found out so far; dies when the trace is done.

    `interface` says whether key-value caches among the model's inputs and outputs may be narrowed, `seen` holds the
    nodes that are done, `state_axes` the channel axes of streamed states among the inputs, `states` their labels where
    they may be narrowed, `modulated` says of nodes that compute filters why nothing passes them.
    """

    facts: Facts
    aliases: dict[str, str]
    interface: bool = False
    labels: Labels = field(default_factory=Labels)
    marks: dict[str, tuple[Mark, ...]] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)
    kinds: list[tuple[Ints, Kind]] = field(default_factory=list)
    weight_labels: dict[tuple[str, int], Ints] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    state_axes: Mapping[str, int] = field(default_factory=dict)
    states: dict[str, Ints] = field(default_factory=dict)
    modulated: Mapping[str, str] = field(default_factory=dict)


class Site:
    """One node as its rule sees it.  Operands are counted like ONNX inputs; an absent one has no name."""

    def __init__(self, flow: Flow, node: ir.Node, version: int) -> None:
        self.flow, self.node, self.version = flow, node, version
        self.key = key(node)
        self.read: set[int] = set()  # operands whose marks were asked for

    # ---- what is there
    def name(self, operand: int) -> str:
        """Name of an input, '' when absent."""
        inputs = self.node.inputs
        value = inputs[operand] if operand < len(inputs) else None
        return value.name or "" if value is not None else ""

    @property
    def operands(self) -> list[int]:
        """Positions of the inputs that are present."""
        return [k for k in range(len(self.node.inputs)) if self.name(k)]

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value, or the default."""
        found = self.node.attributes.get(name)
        return default if found is None else found.value

    def shape(self, operand: int) -> tuple[int, ...]:
        """Concrete shape of an input."""
        return self.flow.facts.shapes[self.name(operand)]

    def out_shape(self, output: int = 0) -> tuple[int, ...]:
        """Concrete shape of an output."""
        return self.flow.facts.shapes[self.out_name(output)]

    def out_name(self, output: int = 0) -> str:
        """Name of an output, '' when absent."""
        outputs = self.node.outputs
        return (outputs[output].name or "") if output < len(outputs) else ""

    def is_constant(self, operand: int) -> bool:
        """Whether an input follows from constants alone."""
        return self.name(operand) in self.flow.facts.constants

    def dtype(self, operand: int) -> np.dtype:
        """Element type of an input."""
        return self.flow.facts.dtypes[self.name(operand)]

    def letter(self, operand: int) -> str:
        """Kind of an input's elements as numpy has it, where bfloat16 is a float like the others."""
        dtype = self.dtype(operand)
        return "f" if slots.is_float(dtype) else dtype.kind

    def value(self, operand: int) -> Array | None:
        """An input's known value, if any: constants, and small integer tensors under the probe feed."""
        return self.flow.facts.values.get(self.name(operand))

    def source(self, operand: int) -> str:
        """The constant behind an input, seen through Identity nodes."""
        return self.flow.aliases.get(self.name(operand), self.name(operand))

    def why(self, reason: str) -> Refusal:
        """A refusal that names this node."""
        reason = self.flow.modulated.get(self.key, reason)
        return Refusal(value=self.key, node=self.node.name or self.key, op=self.node.op_type, reason=reason)

    def why_none(self, mark: Mark) -> Refusal:
        """A refusal for a mark that varies nowhere."""
        return self.why(ONE if mark.labels.size == 1 else TIED)

    def marks(self, operand: int) -> tuple[Mark, ...]:
        """Marks of an input, as they stand after everything tied so far."""
        self.read.add(operand)
        return self._normal(self.flow.marks.get(self.name(operand), ()))

    # ---- what the rule states
    def emit(self, marks: Iterable[Mark | None], output: int = 0) -> None:
        """Put marks on an output."""
        kept = self._normal([m for m in marks if m is not None])
        if kept and self.out_name(output):
            self.flow.marks[self.out_name(output)] = kept

    def union(self, a: Ints, b: Ints, tied: str = "") -> None:
        """These channels live and die together; `tied` says why, where they are channels of one tensor."""
        why = self.why(f"{self.node.op_type} joins them to channels that cannot be narrowed")
        self.flow.labels.union(a, b, why, self.why(tied) if tied else None)

    def tie(self, mark: Mark, axes: Sequence[int], reason: str) -> Mark | None:
        """Nothing along these axes can go alone."""
        return self.flow.labels.tie(mark, axes, self.why(reason))

    def freeze(self, marks: Iterable[Mark], reason: str) -> None:
        """These channels cannot be narrowed."""
        for mark in marks:
            self.flow.labels.freeze(mark.labels.ravel(), self.why(reason))

    def refuse(self, reason: str) -> None:
        """No channel of any input can be narrowed."""
        self.freeze([mark for k in self.operands for mark in self.marks(k)], reason)

    def collapse(self, mark: Mark, axis: int) -> Ints:
        """One label per position of `axis`: everything that shares a position is tied."""
        others = [a for a in mark.axes if a != axis]
        tied = (
            self.flow.labels.tie(mark, others, self.why("one channel is spread over several positions"))
            if others
            else mark
        )
        if tied is None:
            size = mark.labels.shape[mark.along(axis)]
            return np.broadcast_to(self.flow.labels.find(mark.labels.ravel()[:1]), (size,)).copy()
        return tied.labels

    def weight(self, operand: int, axis: int) -> Ints:
        """The labels of one axis of a weight; tied weights share them."""
        slot = (self.source(operand), axis)
        if slot not in self.flow.weight_labels:
            self.flow.weight_labels[slot] = self.flow.labels.fresh(self.shape(operand)[axis])
        return self.flow.weight_labels[slot]

    def carry(
        self,
        operand: int,
        mark: Mark,
        role: Role = "passenger",
        source: tuple[str, int] | None = None,
        inside: tuple[str, ...] = (),
    ) -> None:
        """A constant operand carries the channels: it is cut with them, in whole blocks where blocks share a scale."""
        stored = self.flow.facts.stored.get(self.source(operand))
        if stored is not None:
            self._tie_blocks(stored, mark)
        self.flow.uses.append(Use(self.key, operand, self.source(operand), mark, role, source, inside))

    def _tie_blocks(self, stored: Stored, mark: Mark) -> None:
        for position, axis in enumerate(mark.axes):
            size = stored.block(axis)
            if size > 1:
                first = np.arange(mark.labels.shape[position]) // size * size
                why = self.why(f"a block of {size} numbers shares a scale or a byte")
                self.flow.labels.union(np.take(mark.labels, first, axis=position), mark.labels, why, why)

    def kind(self, labels: Ints, kind: Kind) -> None:
        """Say what people call these channels."""
        self.flow.kinds.append((labels.ravel(), kind))

    def _normal(self, marks: Iterable[Mark]) -> tuple[Mark, ...]:
        found = (self.flow.labels.normal(m, self.why_none(m)) for m in marks)
        return tuple(m for m in found if m is not None)
