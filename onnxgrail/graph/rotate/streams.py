"""Find residual streams: tensors that share a basis, what is added to them, and what reads them.

The search starts at the input of every normalization and follows all operators that do the same in any basis. It ends
at normalizations, at matrices, convolutions and tables, which can take a change of basis into their weights, and at
walls: nodes that cannot.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxgrail.graph.products import is_product
from onnxgrail.graph.rewrite.unique import name_before
from onnxgrail.graph.rotate.layers import Slot, reading, weight_of, writing
from onnxgrail.graph.rotate.norms import Norm
from onnxgrail.graph.rotate.passing import Place, Step, passed
from onnxgrail.graph.trace.facts import Facts, captures

SIZES = ("Shape", "Size")  # read the size of a tensor, not its numbers


@dataclass(frozen=True, slots=True, eq=False)
class Wall:
    """A place where a stream meets a node that depends on its basis.

    Attributes:
        value: the tensor of the stream; axis: its channel axis; norm: the normalization it comes from, if any.
        node: the node, None for an input or output of the model.
        ahead: True if the node reads the tensor, False if it computes it.
    """

    value: ir.Value
    axis: int
    norm: Norm | None
    node: ir.Node | None
    ahead: bool


@dataclass(slots=True, eq=False)
class Stream:
    """Tensors that share a basis.

    Attributes:
        name: of the first normalized tensor, or of a table.
        width: number of channels.
        norms: the normalizations that read it.
        slots: constants in its basis.
        walls: places that do not allow a change of basis.
        tensors: name -> the tensor, its channel axis, and the normalization it comes from.
        sums: number of nodes that add two tensors of the stream.
        measured: without normalizations, the tensors whose second moments give its basis, with their channel axes.
    """

    name: str
    width: int
    norms: list[Norm] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    walls: list[Wall] = field(default_factory=list)
    tensors: dict[ir.Value, tuple[int, Norm | None]] = field(default_factory=dict)
    sums: int = 0
    measured: list[Place] = field(default_factory=list)

    @property
    def linear(self) -> bool:
        """Return True if only layers read and write it."""
        return not self.norms and bool(self.tensors)

    @property
    def centered(self) -> bool:
        """Return True if its normalizations subtract a mean."""
        return any(norm.centered for norm in self.norms)

    @property
    def carries_mean(self) -> bool:
        """Return True if it keeps the mean that its normalizations subtract, because a layer reads it without them."""
        return self.centered and any(slot.reads and slot.norm is None for slot in self.slots)

    @property
    def mixed(self) -> bool:
        """Return True if a product with another tensor mixes its rows, as attention does with values."""
        return any(use.node.op_type == "MatMul" and use.idx == 1 for tensor in self.tensors for use in tensor.uses())

    @property
    def normalized(self) -> list[str]:
        """Return the names of the normalized tensors, in the model before a bridge took the name of an output."""
        return [name_before(norm.result) for norm in self.norms]


def streams_of(model: ir.Model, facts: Facts, norms: Sequence[Norm]) -> list[Stream]:
    """Return the residual streams of a graph: to which something is added, and that several normalizations read.

    If every sum is normalized before the next (BERT), each has a basis of its own, and none is a stream.
    """
    inner = {name for node in model.graph for name in captures(node)}
    finder = _Finder(facts, norms, inner)
    found = []
    for norm in norms:
        if norm.source not in finder.seen:
            axis = len(facts.shapes[norm.source.name or ""]) - 1
            stream = finder.follow(norm.source, axis, name_before(norm.result))
            if stream.sums and len(stream.norms) > 1:
                found.append(stream)
    return found


def linear_streams_of(model: ir.Model, facts: Facts, norms: Sequence[Norm], apart: Collection[ir.Node]) -> list[Stream]:
    """Return the streams that only layers read and write, such as the linear bottlenecks of MobileNetV2.

    No normalization reads them, so any invertible matrix can change their basis if they have no walls.

    Args:
        model: the graph.
        facts: its facts.
        norms: its normalizations.
        apart: layers that have another basis already.
    """
    finder = _Finder(facts, norms, {name for node in model.graph for name in captures(node)})
    found = []
    for node in model.graph:
        value = node.outputs[0]
        makes = weight_of(node, facts) is not None or node.op_type == "BatchNormalization"
        if not makes or value in finder.seen or not facts.has_floats(value.name or ""):
            continue
        axis = len(facts.shapes[value.name or ""]) - 1 if is_product(node) else 1
        stream = finder.follow(value, axis, name_before(value))
        own = not stream.norms and not stream.mixed and not any(slot.node in apart for slot in stream.slots)
        read = dict.fromkeys(slot.node.inputs[0] for slot in stream.slots if slot.reads)
        if own and read and stream.width > 1:
            stream.measured += [(tensor, stream.tensors[tensor][0]) for tensor in read if tensor is not None]
            found.append(stream)
    return found


class _Finder:
    def __init__(self, facts: Facts, norms: Sequence[Norm], inner: set[str]) -> None:
        self.facts, self.inner = facts, inner
        self.begins = {node: norm for norm in norms for node in norm.nodes if norm.source in node.inputs}
        self.results = {norm.result: norm for norm in norms}
        self.seen: set[ir.Value] = set()
        self.queue: list[ir.Value] = []

    def follow(self, value: ir.Value, axis: int, name: str) -> Stream:
        """Return everything in the basis of a tensor."""
        stream = Stream(name, self.facts.shapes[value.name or ""][axis])
        self._push(stream, value, axis, None)
        done: set[ir.Node] = set()
        while self.queue:
            value = self.queue.pop()
            self.seen.add(value)
            axis, own = stream.tensors[value]
            if own is None or value is not own.result:
                self._back(stream, value, axis, own, done)
            if value.is_graph_output() or value.name in self.inner:
                stream.walls.append(Wall(value, axis, own, None, ahead=True))
            for use in (use for use in value.uses() if use.node.op_type not in SIZES):
                self._ahead(stream, value, (use.node, use.idx), done)
        return stream

    def _push(self, stream: Stream, value: ir.Value, axis: int, norm: Norm | None) -> bool:
        """Add a tensor; return False if it is known with another axis or from another normalization."""
        known = stream.tensors.get(value)
        if known is not None:
            return known == (axis, norm)
        if self.facts.shapes.get(value.name or "", ())[axis : axis + 1] != (stream.width,):
            return False
        if norm is None and value in self.results:
            return False
        stream.tensors[value] = (axis, norm)
        self.queue.append(value)
        return True

    def _back(self, stream: Stream, value: ir.Value, axis: int, norm: Norm | None, done: set[ir.Node]) -> None:
        node = value.producer()
        if node is None:
            stream.walls.append(Wall(value, axis, norm, None, ahead=False))
        elif node not in done and not self._through(stream, Step(node, None, axis, self.facts), norm, done):
            slots = writing(node, axis, self.facts) if norm is None else None
            if slots is None:
                done.add(node)
                stream.walls.append(Wall(value, axis, norm, node, ahead=False))
            else:  # a layer may also read the stream
                stream.slots += slots

    def _ahead(self, stream: Stream, value: ir.Value, place: tuple[ir.Node, int], done: set[ir.Node]) -> None:
        (node, operand), (axis, own) = place, stream.tensors[value]
        norm = self.begins.get(node)
        if norm is not None and value is norm.source:
            if own is not None:
                stream.walls.append(Wall(value, axis, own, node, ahead=True))
            elif norm not in stream.norms:
                stream.norms.append(norm)
                self._push(stream, norm.result, len(self.facts.shapes[norm.result.name or ""]) - 1, norm)
            return
        if node in done or self._through(stream, Step(node, operand, axis, self.facts), own, done):
            return
        slot = reading(node, operand, axis, own, self.facts)
        if slot is None:
            stream.walls.append(Wall(value, axis, own, node, ahead=True))
        else:
            stream.slots.append(slot)

    def _through(self, stream: Stream, step: Step, norm: Norm | None, done: set[ir.Node]) -> bool:
        """Follow a node that does the same in any basis; return False for another node."""
        found = passed(step)
        outputs = len(step.node.outputs)
        if found is None or (norm is not None and (found.constants or len(found.tensors) > outputs + 1)):
            return False
        done.add(step.node)
        strange = [place for place in found.tensors if not self._push(stream, *place, norm)]
        for value, axis in strange:
            own = value in step.node.outputs
            stream.walls.append(Wall(value, axis, norm, step.node if own else value.producer(), ahead=own))
        stream.slots += [Slot(node=step.node, operand=k, axis=axis) for k, axis in found.constants]
        joined = step.node.op_type in ("Add", "Sum") and norm is None
        stream.sums += joined and len(found.tensors) > 2
        return True
