"""The quantities that the time of a kernel depends on: its kind, multiply-accumulates and bytes, at any widths."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.prepared import Prepared
from onnxgrail.core import Bools, Floats
from onnxgrail.graph.cost import counting
from onnxgrail.graph.cost.meter import dead_of
from onnxgrail.graph.trace.facts import key
from onnxgrail.search.kernels import Measured

MOVES = "moves"
BLOCKED, PLAIN = "blocked", "plain"  # layouts of a convolution's channels
WHOLE, PART = "whole", "part"  # channels of a conversion: whole blocks, or some in a part of one, which is slower
ALIGNED = 4  # ONNX Runtime converts only multiples of this many channels to blocks
POOLS = frozenset({"AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool"})  # only whole blocks stay blocks

Kind = tuple[str, ...]
"""Operator of a node, for a convolution also its form, and for both convolutions and pools their layout.

(MOVES, channels) if a kernel converts a tensor.
"""
Place = tuple[str, bool]
"""Key of a node, and True if a kernel converts its output."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A measured kernel: its node, its kind, (3,) features and milliseconds."""

    node: ir.Node
    kind: Kind
    features: Floats
    ms: float

    @property
    def place(self) -> Place:
        """Return the place of the kernel in the graph."""
        return key(self.node), self.kind[0] == MOVES


class Features:
    """The features of nodes without some units: 1, multiply-accumulates, bytes read and written."""

    def __init__(self, prepared: Prepared, block: int, full: Measured) -> None:
        """Prepare the features of a model.

        Args:
            prepared: the model.
            block: channels per block on this machine.
            full: its kernels at full widths.
        """
        self.survey, self._block, self._converted = prepared.survey, block, full.moves
        self._nodes = {key(node): node for node in prepared.model.graph}
        known = [node for node in prepared.model.graph if key(node) in full.work]
        self._full = {key(node): self._kind(node, blocked=key(node) in full.blocked) for node in known}
        blocked = [node for node in known if self._full[key(node)][-1] == BLOCKED]
        self._makers = {key(node): self._maker(node) for node in blocked}

    def samples(self, measured: Measured) -> list[Sample]:
        """Return the kernels at some widths, with their features there."""
        dead, found = dead_of(self.survey, measured.widths), list[Sample]()
        for times, moved in ((measured.work, False), (measured.moves, True)):
            for name, ms in times.items():
                node = self._nodes.get(name)
                if node is not None:
                    kind = self._move(node, dead) if moved else self._kind(node, blocked=name in measured.blocked)
                    found.append(Sample(node, kind, self.of(node, kind, dead), ms))
        return found

    def _kind(self, node: ir.Node, *, blocked: bool) -> Kind:
        """Return the kind of a node; kernels of a kind are fitted together."""
        layout = BLOCKED if blocked else PLAIN
        if node.op_type in POOLS:
            return node.op_type, layout
        if node.op_type not in counting.CONVOLUTIONS:
            return (node.op_type,)
        weight = self._weight(node, None)
        form = "depthwise" if weight[1:2] == (1,) else "pointwise" if math.prod(weight[2:]) == 1 else "dense"
        return node.op_type, form, layout

    def kind_at(self, node: ir.Node, kind: Kind, dead: Bools | None) -> Kind:
        """Return the kind that a node has without the dead units, by the rule of ONNX Runtime for channels in blocks.

        Args:
            node: the node.
            kind: its kind at full widths, which tells all but the layout.
            dead: (ids,) mask of removed units; None for full widths.
        """
        if kind[0] == MOVES:
            return self._move(node, dead)
        if kind[-1] not in (BLOCKED, PLAIN):
            return kind
        taken = self._channels(node, dead)
        if node.op_type in POOLS:
            return kind if taken % self._block == 0 else (*kind[:-1], PLAIN)
        return (*kind[:-1], BLOCKED if self._direct(node, kind, dead) or taken % ALIGNED == 0 else PLAIN)

    def of(self, node: ir.Node, kind: Kind, dead: Bools) -> Floats:
        """Return (3,) features of a node without the dead units."""
        blocked = kind[-1] == BLOCKED
        written = self._bytes(node.outputs, dead, blocked=blocked)
        if kind[0] == MOVES:
            return np.array([1.0, 0.0, written])
        padded = blocked and node.op_type in counting.CONVOLUTIONS
        macs = counting.node_macs(node, self.survey, dead) * (self._padding(node, dead) if padded else 1.0)
        read = self._bytes(node.inputs, dead, blocked=blocked) + self._constants(node, dead)
        return np.array([1.0, macs, written + read])

    def moved(self, node: ir.Node, full: Kind, laid: Kind, dead: Bools) -> float:
        """Return the bytes that are converted for a node because its layout is no longer that of its neighbors.

        Args:
            node: the node.
            full: its kind at full widths.
            laid: its kind without the dead units.
            dead: (ids,) mask of removed units.
        """
        same = laid == full
        if full[-1] != BLOCKED or (same and not self._narrowed_to_part(node, full, dead)):
            return 0.0
        total = 0.0
        if self._meets_blocks(node, dead):
            value = node.inputs[0]
            readers = 1 if value is None else sum(use.node.op_type in counting.CONVOLUTIONS for use in value.uses())
            total += self._bytes([value], dead, blocked=False) / max(1, readers)  # converted once for all of them
        if not same and node.op_type in POOLS and self._channels(node, dead) % ALIGNED == 0:
            total += self._bytes(node.outputs[:1], dead, blocked=False)  # the next convolution has blocks again
        return total

    def _narrowed_to_part(self, node: ir.Node, kind: Kind, dead: Bools) -> bool:
        """Return True if a convolution reads fewer channels than a block without the dead units, and only then."""
        return self._direct(node, kind, dead) and not self._direct(node, kind, None)

    def _meets_blocks(self, node: ir.Node, dead: Bools) -> bool:
        """Return True if what a node reads is in blocks without the dead units, and not converted at full widths."""
        value, maker = node.inputs[0], self._makers.get(key(node))
        direct = value.producer() if value is not None else None
        if maker is None or direct is None or key(direct) in self._converted:
            return False
        full = self._full[key(maker)]
        return full[-1] == BLOCKED and self.kind_at(maker, full, dead) == full

    def near(self, node: ir.Node) -> list[ir.Node]:
        """Return the nodes whose channels decide the layout of a node: itself, and what it reads."""
        maker = self._makers.get(key(node))
        return [node] if maker is None else [node, maker]

    def _maker(self, node: ir.Node) -> ir.Node | None:
        """Return the convolution or pool whose result a node reads, maybe after nodes of other kinds."""
        value = node.inputs[0]
        while value is not None and (found := value.producer()) is not None:
            if self._full.get(key(found), (MOVES,))[-1] in (BLOCKED, PLAIN):
                return found
            value = found.inputs[0] if found.inputs else None
        return None

    def _move(self, node: ir.Node, dead: Bools | None) -> Kind:
        """Return the kind of a kernel that converts what a node computes."""
        made = math.prod(self._shape(node.outputs[0], dead)[1:2])
        return MOVES, PART if made % self._block else WHOLE

    def _direct(self, node: ir.Node, kind: Kind, dead: Bools | None) -> bool:
        """Return True if a convolution reads so few channels that it does so without blocks."""
        dense = node.op_type not in POOLS and kind[1] != "depthwise"
        return dense and self._channels(node, dead) < self._block

    def _channels(self, node: ir.Node, dead: Bools | None) -> int:
        """Return the channels that a node reads."""
        return math.prod(self._shape(node.inputs[0], dead)[1:2])

    def _shape(self, value: ir.Value | None, dead: Bools | None) -> tuple[int, ...]:
        name = value.name or "" if value is not None else ""
        return counting.shapes(self.survey, dead)(name) if name in self.survey.facts.shapes else ()

    def _bytes(self, values: Iterable[ir.Value | None], dead: Bools, *, blocked: bool) -> float:
        """Return the bytes of tensors that are computed from inputs."""
        facts, total = self.survey.facts, 0.0
        for value in values:
            name = value.name or "" if value is not None else ""
            if name in facts.shapes and name not in facts.constants:
                sizes = list(self._shape(value, dead))
                if blocked and len(sizes) > 1:
                    sizes[1] = self._up(sizes[1])
                total += math.prod(sizes) * facts.dtypes[name].itemsize
        return total

    def _constants(self, node: ir.Node, dead: Bools) -> float:
        """Return the bytes of a node's constants."""
        facts, total = self.survey.facts, 0.0
        for place, value in enumerate(node.inputs):
            name = value.name or "" if value is not None else ""
            if name in facts.shapes and name in facts.constants:
                total += math.prod(self._operand(node, place, dead)) * facts.dtypes[name].itemsize
        return total

    def _operand(self, node: ir.Node, place: int, dead: Bools | None) -> tuple[int, ...]:
        shape, operand = self._shape(node.inputs[place], None), self.survey.operands.get((key(node), place))
        return shape if operand is None or dead is None else operand.left(shape, dead)

    def _weight(self, node: ir.Node, dead: Bools | None) -> tuple[int, ...]:
        """Return the shape of a convolution's weight."""
        return self._operand(node, 3 if node.op_type in counting.BEHIND_SCALES else 1, dead)

    def _padding(self, node: ir.Node, dead: Bools) -> float:
        """Return the factor by which incomplete blocks of channels add to the multiply-accumulates."""
        made, taken = (
            math.prod(shape[1:2]) for shape in (self._shape(node.outputs[0], dead), self._weight(node, dead))
        )
        deep = self._up(taken) if taken >= self._block else taken  # fewer channels than a block are not padded
        return self._up(made) * deep / max(1, made * taken)

    def _up(self, channels: int) -> int:
        return -(-channels // self._block) * self._block
