"""Write the normalizations of a rotation as one node, and in the end, as tied heads, with standard operators.

They get forms that runtimes fuse or fold. Normalizations inside heads that were one operator are one again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.graph.attributes import MICROSOFT, given, is_read, number, numbers_of
from onnxgrail.graph.io.opset import opset_of
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.assign import sweep
from onnxgrail.graph.rewrite.unique import free_name, names_kept
from onnxgrail.graph.rotate.marked import FUSED, PLAIN, TURNED, is_rotated, marks_of
from onnxgrail.graph.rotate.norms import Norm

FLOAT = ir.DataType.FLOAT
AXES_INPUT = 18  # first opset in which ReduceMean takes its axes as an input


def restore(model: ir.Model) -> None:
    """Replace what rotations need by standard operators, in place; no mark of a rotation is left."""
    graph = model.graph
    _transpose_tables(model)
    found = [node for node in graph if is_rotated(node) and FUSED not in node.metadata_props]
    for node in graph:
        node.op_type = node.metadata_props.get(FUSED, node.op_type)
        for name in marks_of(node):
            del node.metadata_props[name]
    if not found:
        return
    with names_kept(graph):
        writer = _Writer(graph, opset_of(model))
        for node in found:
            writer.write(node)


def _transpose_tables(model: ir.Model) -> None:
    """Let heads read the transpose of a table, which a runtime folds when it loads the model."""
    graph = model.graph
    turned: dict[ir.Value, ir.Value] = {}
    for head in [node for node in graph if TURNED in node.metadata_props]:
        table = given(head, 1)
        if table not in turned:
            name = free_name(graph, f"{table.name}/turned")
            node = ir.Node("", "Transpose", [table], [ir.AttrInt64s("perm", [1, 0])], num_outputs=1, name=name)
            node.outputs[0].name = name
            graph.insert_before(head, node)
            turned[table] = node.outputs[0]
        head.op_type, head.domain = "MatMul", ""
        del head.attributes["transB"], head.metadata_props[TURNED]
        head.replace_input_with(1, turned[table])
    if turned and not any(node.domain == MICROSOFT for node in graph):
        del model.opset_imports[MICROSOFT]


def simplify(graph: ir.Graph, norm: Norm, marks: Mapping[str, str], types: tuple[np.dtype, np.dtype]) -> None:
    """Replace a normalization by one node that divides by the root mean square and applies the gain.

    Half types are often normalized in float32. Then a cast follows the node.

    Args:
        graph: changed in place.
        norm: its shift is left out, and the mean is not subtracted.
        marks: metadata of the node.
        types: of what it reads and of its result.
    """
    result = norm.result
    numbers = np.ones(norm.width) if norm.gain is None else norm.gain
    gain = constant(graph, numbers.astype(types[0]), f"{result.name}/gain")
    attributes = [ir.AttrInt64("axis", -1), ir.AttrFloat32("epsilon", norm.epsilon)]
    node = ir.Node("", PLAIN, [norm.source, gain], attributes, num_outputs=1, name=norm.nodes[-1].name)
    node.metadata_props.update(marks)
    graph.insert_after(norm.nodes[-1], node)
    fresh, name = _as_type(graph, node, types, f"{result.name}/wide"), result.name
    fresh.type, fresh.shape = result.type, result.shape
    result.replace_all_uses_with(fresh)
    read = [value for old in norm.nodes for value in old.inputs if value is not None]
    for old in reversed(norm.nodes):
        if not any(map(is_read, old.outputs)):
            graph.remove(old, safe=True)
    sweep(graph, read)
    result.name = None if result.producer() is None else f"{name}/old"
    fresh.name = name


def _as_type(graph: ir.Graph, node: ir.Node, types: tuple[np.dtype, np.dtype], name: str) -> ir.Value:
    """Return the output of a node in the second of two types, cast from the first if they differ."""
    made = node.outputs[0]
    if types[0] == types[1]:
        return made
    made.name = free_name(graph, name)
    to = ir.AttrInt64("to", int(ir.DataType.from_numpy(types[1])))
    cast = ir.Node("", "Cast", [made], [to], num_outputs=1, name=free_name(graph, f"{name}/Cast"))
    graph.insert_after(node, cast)
    return cast.outputs[0]


class _Writer:
    """Replaces normalizations; constants that are alike are stored once."""

    def __init__(self, graph: ir.Graph, opset: int) -> None:
        self.graph, self.opset = graph, opset
        self._constants: dict[tuple[str, bytes], ir.Value] = {}

    def write(self, node: ir.Node) -> None:
        """Replace one normalization by the nodes x / sqrt(mean(x²) + epsilon) * gain."""
        x, gain, name = given(node, 0), given(node, 1), node.outputs[0].name or ""
        stored = ir.DataType.from_numpy(numbers_of(gain).dtype)
        wide = stored.itemsize >= FLOAT.itemsize  # squares of half floats overflow
        numbers = (stored if wide else FLOAT).numpy()
        long = x if wide else self._cast(node, x, FLOAT, f"{name}/float")
        square = self._node(node, "Pow", [long, self._constant(np.array(2, numbers), "two")], f"{name}/square")
        mean = self._mean(node, square, f"{name}/mean")
        epsilon = self._constant(np.array(number(node, "epsilon"), numbers), "epsilon")
        total = self._node(node, "Add", [mean, epsilon], f"{name}/stable")
        root = self._node(node, "Sqrt", [total], f"{name}/root")
        unit = self._node(node, "Div", [long, root], f"{name}/unit")
        unit = unit if wide else self._cast(node, unit, stored, f"{name}/short")
        out = node.outputs[0]
        out.name = None
        last = self._node(node, "Mul", [unit, gain], name)
        last.type, last.shape = out.type, out.shape
        out.replace_all_uses_with(last)
        self.graph.remove(node, safe=True)

    def _cast(self, node: ir.Node, value: ir.Value, to: ir.DataType, name: str) -> ir.Value:
        return self._node(node, "Cast", [value], name, [ir.AttrInt64("to", int(to))])

    def _mean(self, node: ir.Node, square: ir.Value, name: str) -> ir.Value:
        if self.opset < AXES_INPUT:
            return self._node(node, "ReduceMean", [square], name, [ir.AttrInt64s("axes", [-1])])
        axes = self._constant(np.array([-1], np.int64), "last")
        return self._node(node, "ReduceMean", [square, axes], name)

    def _node(
        self, before: ir.Node, op: str, inputs: Sequence[ir.Value], name: str, attributes: Sequence[ir.Attr] = ()
    ) -> ir.Value:
        node = ir.Node(
            "", op, list(inputs), list(attributes), num_outputs=1, name=free_name(self.graph, f"{name}/{op}")
        )
        node.outputs[0].name = name
        self.graph.insert_before(before, node)
        return node.outputs[0]

    def _constant(self, array: Array, name: str) -> ir.Value:
        key = name, array.tobytes()
        if key not in self._constants:
            self._constants[key] = constant(self.graph, array, f"rms/{name}")
        return self._constants[key]
