"""The interface through which an op's rewrite narrows one node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Bools, Ints
from onnxgrail.graph.attributes import given, name_of
from onnxgrail.graph.io.mapped import like
from onnxgrail.graph.rewrite.unique import free_name
from onnxgrail.graph.trace.facts import Facts
from onnxgrail.graph.trace.labels import Mark
from onnxgrail.graph.trace.survey import Sizes


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A node during narrowing.

    Attributes:
        node: the node, edited in place.
        facts: shapes and values of the *original* model.
        marks: marks of the original model's tensors, with unit numbers as labels.
        dead: (ids,) mask of removed units; entry 0 is False.
        sizes: computed sizes that are right without a correction.
    """

    node: ir.Node
    facts: Facts
    marks: Mapping[str, tuple[Mark, ...]]
    dead: Bools
    sizes: Sizes

    @property
    def _graph(self) -> ir.Graph:
        graph = self.node.graph
        assert isinstance(graph, ir.Graph)
        return graph

    def operand(self, operand: int) -> ir.Value:
        """Return an input that is present."""
        return given(self.node, operand)

    @property
    def version(self) -> int:
        """Return the opset of the standard operators."""
        graph = self.node.graph
        return graph.opset_imports.get("", 13) if isinstance(graph, ir.Graph) else 13

    def input_name(self, operand: int) -> str:
        """Return the name of an input in the original model, '' if absent."""
        return name_of(self.node, operand)

    def output_name(self, output: int = 0) -> str:
        """Return the name of an output, '' if absent."""
        return (self.node.outputs[output].name or "") if output < len(self.node.outputs) else ""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the original shape of a tensor."""
        return self.facts.shapes[name]

    def alive(self, name: str) -> dict[int, Bools]:
        """Return, for each axis of a tensor that loses positions, a mask of the kept positions."""
        found: dict[int, Bools] = {}
        for mark in self.marks.get(name, ()):
            (axis,) = mark.axes
            stays = ~self.dead[mark.labels]
            if not stays.all():
                found[axis] = stays
        return found

    def labels(self, name: str, axis: int) -> Ints | None:
        """Return the unit numbers along an axis; None if nothing there can be removed."""
        return next((m.labels for m in self.marks.get(name, ()) if m.axes == (axis,)), None)

    def set_operand(self, operand: int, array: Array, hint: str) -> None:
        """Replace an input by a new constant."""
        graph = self._graph
        while operand >= len(self.node.inputs):
            self.node.resize_inputs(operand + 1)
        self.node.replace_input_with(operand, constant(graph, array, f"{self.output_name()}/{hint}"))

    def compute_operand(
        self,
        operand: int,
        op: str,
        inputs: Sequence[ir.Value | Array],
        hint: str,
        attributes: Sequence[ir.Attr] = (),
    ) -> None:
        """Replace an input by the output of a new node, inserted before this node."""
        node = self._made(op, inputs, hint, attributes)
        self._graph.insert_before(self.node, node)
        self.node.replace_input_with(operand, node.outputs[0])

    def correct_output(self, steps: Sequence[tuple[str, Callable[[ir.Value], Sequence[ir.Value | Array]]]]) -> None:
        """Insert nodes after the first output; its readers then read the output of the last node."""
        value, last = self.node.outputs[0], self.node
        readers = [(use.node, use.idx) for use in value.uses()]
        for op, inputs in steps:
            node = self._made(op, inputs(value), op)
            self._graph.insert_after(last, node)
            value, last = node.outputs[0], node
        for reader, position in readers:
            reader.replace_input_with(position, value)

    def _made(
        self, op: str, inputs: Sequence[ir.Value | Array], hint: str, attributes: Sequence[ir.Attr] = ()
    ) -> ir.Node:
        """Return a new node that is not in the graph yet."""
        name = free_name(self._graph, f"{self.output_name()}/{hint}")
        named = ((f"{name}/{number}", value) for number, value in enumerate(inputs))
        values = [v if isinstance(v, ir.Value) else constant(self._graph, v, label) for label, v in named]
        node = ir.Node("", op, values, list(attributes), num_outputs=1, name=name)
        node.outputs[0].name = name
        return node

    def set_int(self, name: str, value: int) -> None:
        """Set an integer attribute."""
        self.node.attributes[name] = ir.AttrInt64(name, value)

    def recount(self, attribute: str, name: str, axis: int) -> None:
        """Set a count of groups or heads from the kept positions of an axis: groups that keep none are removed."""
        labels = self.labels(name, axis)
        if labels is not None:
            groups = labels.reshape(self.node.attributes[attribute].as_int(), -1)
            self.set_int(attribute, int((~self.dead[groups]).any(axis=1).sum()))


def constant(graph: ir.Graph, array: Array, name: str, *, old: ir.Value | None = None) -> ir.Value:
    """Create a constant under a name that is free in the graph.

    It becomes an initializer, or a Constant node if all initializers are model inputs too (IR version 3), since inputs
    are the model's interface.

    Args:
        graph: the graph.
        array: its numbers.
        name: the preferred name.
        old: the constant it replaces; if that is in a file, the new one goes to a file too.
    """
    name = free_name(graph, name)
    tensor = ir.tensor(np.array(array, order="C"), name=name)
    if graph.initializers and all(v.is_graph_input() for v in graph.initializers.values()):
        node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], name=name)
        node.outputs[0].name = name
        graph.insert_before(graph[0], node)
        return node.outputs[0]
    stored = tensor if old is None else like(old.const_value, tensor)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=stored)
    graph.register_initializer(value)
    return value
