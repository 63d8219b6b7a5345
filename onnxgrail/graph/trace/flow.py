"""The state of one trace, and the interface through which operator rules read and extend it.

A rule reads the marks and constants of a node's inputs through a `Site`, states which channels are tied or frozen and
which constants carry them, and emits marks for the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Ints, Kind, Refusal, Role
from onnxgrail.graph import slots
from onnxgrail.graph.attributes import name_of
from onnxgrail.graph.stored.integers import Stored
from onnxgrail.graph.trace.facts import Facts, key
from onnxgrail.graph.trace.labels import TIED, Labels, Mark

ONE = "there is only one channel, and one must stay"


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """A constant operand that carries channels.

    Attributes:
        node: key of the node; operand: position among its inputs; value: name of the constant.
        mark: labels in the constant's own coordinates.
        role: as in `core.Slot`.
        source: for a consumer, its input activation and that activation's channel axis.
        inside: place of the activation inside a fused node, as in `core.Probe`; `source` is then the node's input.
        scaled: as in `Operand`.
        met: labels on the axis of the source, if it has several positions for each one of the constant.
    """

    node: str
    operand: int
    value: str
    mark: Mark
    role: Role
    source: tuple[str, int] | None = None
    inside: tuple[str, ...] = ()
    scaled: bool = False
    met: Ints | None = None


@dataclass(slots=True, eq=False)
class Flow:
    """The state of a trace.

    Attributes:
        facts: shapes and known values.
        aliases: name -> name of the weight it stands for.
        interface: key-value caches and states among the model's inputs and outputs may be narrowed.
        labels: equivalence classes of channels; marks: by tensor; uses: constants that carry channels.
        kinds: labels with the block kind that a rule stated; weight_labels: (weight, axis) -> labels.
        seen: keys of visited nodes.
        state_axes: channel axes of streamed states among the inputs; states: their labels if they may be narrowed.
        modulated: nodes that compute filters -> why channels do not pass them.
        deciding: nodes that decide the lengths of tensors.
        tables: marks that products of two activations read, by (node, operand, channel axis); None if heads are units.
        positions: operands with which products scale channels inside heads by position, by node.
        normed: nodes of normalizations that are passed as one -> for the last of them what the first reads, else ''.
        ranked: labels in the order of a rotation, and the name of that rotation.
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
    deciding: frozenset[str] = frozenset()
    tables: dict[tuple[str, int, int], Mark] | None = None
    positions: dict[str, int] = field(default_factory=dict)
    normed: Mapping[str, str] = field(default_factory=dict)
    ranked: list[tuple[Ints, str]] = field(default_factory=list)


class Site:
    """A node as its rule sees it.  Operands are numbered like ONNX inputs; an absent input has no name."""

    def __init__(self, flow: Flow, node: ir.Node, version: int) -> None:
        self.flow, self.node, self.version = flow, node, version
        self.key = key(node)
        self.read: set[int] = set()  # operands whose marks were read

    # ---- inputs, outputs, attributes
    def name(self, operand: int) -> str:
        """Return the name of an input, '' if absent."""
        return name_of(self.node, operand)

    @property
    def operands(self) -> list[int]:
        """Return the positions of the inputs that are present."""
        return [k for k in range(len(self.node.inputs)) if self.name(k)]

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute's value, or the default."""
        found = self.node.attributes.get(name)
        return default if found is None else found.value

    def shape(self, operand: int) -> tuple[int, ...]:
        """Return the concrete shape of an input."""
        return self.flow.facts.shapes[self.name(operand)]

    def out_shape(self, output: int = 0) -> tuple[int, ...]:
        """Return the concrete shape of an output."""
        return self.flow.facts.shapes[self.out_name(output)]

    def out_name(self, output: int = 0) -> str:
        """Return the name of an output, '' if absent."""
        outputs = self.node.outputs
        return (outputs[output].name or "") if output < len(outputs) else ""

    def is_constant(self, operand: int) -> bool:
        """Return True if an input is computed from constants alone."""
        return self.name(operand) in self.flow.facts.constants

    def dtype(self, operand: int) -> np.dtype:
        """Return the element type of an input."""
        return self.flow.facts.dtypes[self.name(operand)]

    def letter(self, operand: int) -> str:
        """Return numpy's kind letter of an input's elements; "f" for bfloat16 too."""
        dtype = self.dtype(operand)
        return "f" if slots.is_float(dtype) else dtype.kind

    def value(self, operand: int) -> Array | None:
        """Return the value of a constant or small integer input under the probe feed; None if unknown."""
        return self.flow.facts.values.get(self.name(operand))

    def source(self, operand: int) -> str:
        """Return the name of the constant that an input stands for; equal ones have one name."""
        return self.flow.aliases.get(self.name(operand), self.name(operand))

    def why(self, reason: str) -> Refusal:
        """Return a refusal that names this node."""
        reason = self.flow.modulated.get(self.key, reason)
        return Refusal(value=self.key, node=self.node.name or self.key, op=self.node.op_type, reason=reason)

    def why_none(self, mark: Mark) -> Refusal:
        """Return a refusal for a mark that does not vary along any axis."""
        return self.why(ONE if mark.labels.size == 1 else TIED)

    def marks(self, operand: int) -> tuple[Mark, ...]:
        """Return the marks of an input, with all ties made so far applied."""
        self.read.add(operand)
        return self._normal(self.flow.marks.get(self.name(operand), ()))

    # ---- statements of the rule
    def emit(self, marks: Iterable[Mark | None], output: int = 0) -> None:
        """Put marks on an output."""
        kept = self._normal([m for m in marks if m is not None])
        if kept and self.out_name(output):
            self.flow.marks[self.out_name(output)] = kept

    def union(self, a: Ints, b: Ints, tied: str = "") -> None:
        """Tie channels pairwise: they are kept or removed together.

        Args:
            a: labels.
            b: labels of a shape that broadcasts with `a`.
            tied: the reason why they depend on each other, if they are channels of one tensor.
        """
        why = self.why(f"{self.node.op_type} joins them to channels that cannot be narrowed")
        self.flow.labels.union(a, b, why, self.why(tied) if tied else None)

    def tie(self, mark: Mark, axes: Sequence[int], reason: str) -> Mark | None:
        """Tie all positions of a mark along these axes: none can be removed alone.

        Returns:
            The mark on its other axes; None if nothing can be removed any more.
        """
        return self.flow.labels.tie(mark, axes, self.why(reason))

    def freeze(self, marks: Iterable[Mark], reason: str) -> None:
        """Freeze channels: they cannot be narrowed."""
        for mark in marks:
            self.flow.labels.freeze(mark.labels.ravel(), self.why(reason))

    def refuse(self, reason: str) -> None:
        """Freeze the channels of all inputs."""
        self.freeze([mark for k in self.operands for mark in self.marks(k)], reason)

    def collapse(self, mark: Mark, axis: int) -> Ints:
        """Return one label per position of `axis`, after tying everything that shares a position."""
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
        """Return the labels of one axis of a weight; weights tied by name share them."""
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
        *,
        scaled: bool = False,
    ) -> None:
        """Record that a constant operand carries the channels and is cut with them.

        Channels of a quantized weight whose blocks share a scale are tied within each block.

        Args:
            operand: position of the constant among the inputs.
            mark: labels on the constant's own axes.
            role: as in `core.Slot`.
            source: for a consumer, its input activation and that activation's channel axis.
            inside: as in `core.Probe`.
            scaled: as in `Operand`.
        """
        stored = self.flow.facts.stored.get(self.source(operand))
        if stored is not None:
            self._tie_blocks(stored, mark)
        self.flow.uses.append(Use(self.key, operand, self.source(operand), mark, role, source, inside, scaled))

    def meets(self, labels: Ints) -> None:
        """Record the labels on the source of the last consumer, if it has several positions for each of the weight."""
        self.flow.uses[-1] = replace(self.flow.uses[-1], met=labels)

    def passenger(self, operand: int, labels: Ints, why: str, *, axis: int = 0, whole: bool = False) -> None:
        """Cut an operand, if there is one, together with the channels; freeze them if it is computed at run time.

        Args:
            operand: position of a bias or a scale among the inputs.
            labels: on its axis.
            why: the reason to freeze them.
            axis: of the operand.
            whole: freeze all channels of an operand that is computed.
        """
        if self.is_constant(operand):
            self.carry(operand, Mark((axis,), labels))
        elif self.name(operand):
            self.freeze([Mark((axis,), labels), *(self.marks(operand) if whole else ())], why)

    def _tie_blocks(self, stored: Stored, mark: Mark) -> None:
        for position, axis in enumerate(mark.axes):
            size = stored.block(axis)
            if size > 1:
                first = np.arange(mark.labels.shape[position]) // size * size
                why = self.why(f"a block of {size} numbers shares a scale or a byte")
                self.flow.labels.union(np.take(mark.labels, first, axis=position), mark.labels, why, why)

    def kind(self, labels: Ints, kind: Kind) -> None:
        """Record the block kind of these channels."""
        self.flow.kinds.append((labels.ravel(), kind))

    def rank(self, labels: Ints, kind: Kind, rotation: str) -> None:
        """Record that a rotation left these channels, of a block of this kind, in falling order of importance."""
        self.kind(labels, kind)
        self.flow.ranked.append((labels.ravel(), rotation))

    def _normal(self, marks: Iterable[Mark]) -> tuple[Mark, ...]:
        found = (self.flow.labels.normal(m, self.why_none(m)) for m in marks)
        return tuple(m for m in found if m is not None)
