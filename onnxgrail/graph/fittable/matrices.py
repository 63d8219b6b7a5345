"""Find matrices that can be replaced by two low-rank factors, and tables whose rows are looked up; replace matrices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array, Refusal
from onnxgrail.graph.attributes import given, integer, integers, moved_from, number, numbers_of
from onnxgrail.graph.fittable.trainable import FLOATS
from onnxgrail.graph.notes import scope
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import free_name
from onnxgrail.graph.stored.looked_up import is_pairs
from onnxgrail.graph.trace.facts import captures, key

LINEAR = frozenset({"MatMul", "Gemm", "FusedMatMul"})
WEIGHTED = frozenset(
    {
        "Attention", "Conv", "ConvInteger", "ConvTranspose", "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul", "Einsum", "GRU", "LSTM", "MatMulInteger",
        "MatMulIntegerToFloat", "MatMulNBits", "MoE", "QAttention", "QLinearConv", "QLinearMatMul", "QMoE", "RNN",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Matrix:
    """A weight (m, n) as in y = x W, and everything that reads it.

    Attributes:
        weight: the initializer; turned: it is stored as (n, m).
        nodes: the nodes that multiply by it.
        inputs, outputs: m and n.
    """

    weight: str
    turned: bool
    nodes: tuple[ir.Node, ...]
    inputs: int
    outputs: int

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names a user may give: the weight, its nodes, their modules, their outputs."""
        return (self.weight, *(n for node in self.nodes for n in (node.name or "", scope(node), key(node)) if n))


def array_of(matrix: Matrix, graph: ir.Graph) -> Array:
    """Return the numbers of the matrix, (m, n); the axes of a convolution after the first one are inputs."""
    numbers = numbers_of(graph.initializers[matrix.weight])
    array = numbers.reshape(len(numbers), -1)
    return array.T if matrix.turned else array


def matrices(model: ir.Model) -> dict[ir.Node, Matrix]:
    """Return the matrix of each product whose matrix has only such products as readers."""
    found: dict[ir.Node, Matrix] = {}
    for name, tensor, readers in stored(model):
        ways = {turned_in(node, place, turned) for node, place, turned in readers}
        if len(ways) == 1 and None not in ways:
            turned = bool(ways.pop())
            rows, columns = (int(size) for size in tensor.shape.numpy())
            sizes = (columns, rows) if turned else (rows, columns)
            nodes = tuple(node for node, _, _ in readers)
            matrix = Matrix(weight=name, turned=turned, nodes=nodes, inputs=sizes[0], outputs=sizes[1])
            found.update(dict.fromkeys(nodes, matrix))
    return found


def stored(model: ir.Model) -> Iterator[tuple[str, ir.TensorProtocol, list[tuple[ir.Node, int, bool]]]]:
    """Yield the float initializers of two axes that only nodes of the graph read: name, numbers, and their `uses`."""
    fixed = {name for node in model.graph for name in captures(node)}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in FLOATS or len(tensor.shape) != 2 or name in fixed:
            continue
        if not value.is_graph_input() and not value.is_graph_output():
            yield name, tensor, list(uses(value, turned=False))


def uses(value: ir.Value, *, turned: bool) -> Iterator[tuple[ir.Node, int, bool]]:
    """Yield the readers of a constant, also through Transpose: node, operand, True if transposed."""
    for use in value.uses():
        node, out = use.node, use.node.outputs[0]
        if node.op_type == "Transpose" and integers(node, "perm", (1, 0)) == (1, 0) and not out.is_graph_output():
            yield from uses(out, turned=not turned)
        else:
            yield node, use.idx, turned


def turned_in(node: ir.Node, place: int, turned: bool) -> bool | None:
    """Return True if a product reads the stored (n, m) form; None if it is not a plain product from the right."""
    if node.op_type not in LINEAR or place != 1 or _odd(node):
        return None
    return turned != bool(integer(node, "transB"))


def refusal(node: ir.Node, known: Mapping[ir.Node, Matrix], fixed: Collection[str]) -> Refusal | None:
    """Return why a node keeps its weight; None if it has no weight or its weight can be replaced."""
    reason = "" if node in known else _reason(node, fixed)
    weight = next((v.name or "" for v in node.inputs if v is not None and v.name in fixed), key(node))
    return Refusal(value=weight, node=node.name or key(node), op=node.op_type, reason=reason) if reason else None


def _reason(node: ir.Node, fixed: Collection[str]) -> str:
    held = [v is not None and v.name in fixed for v in node.inputs]
    if node.op_type in WEIGHTED:
        return f"no low-rank form of {node.op_type}" if any(held) else ""
    if node.op_type not in LINEAR or not any(held[:2]):
        return ""
    if not held[1]:
        return "its weight is the left operand"
    return "its operands are turned" if _odd(node) else _why(node.inputs[1])


def _why(value: ir.Value | None) -> str:
    """Return why a constant on the right of a product is not a matrix that can be replaced."""
    value = moved_from(value, ("Transpose",)) if value is not None else None
    maker = value.producer() if value is not None else None
    if maker is not None:
        quantised = maker.op_type in ("DequantizeLinear", "Cast")
        return "its weight is stored in another type" if quantised else f"its weight is made by {maker.op_type}"
    if value is None or value.const_value is None or len(value.const_value.shape) != 2:
        return "its weight is no plain matrix"
    if value.is_graph_input() or value.is_graph_output():
        return "its weight is an input or output of the model"
    others = [reader for reader, place, turned in uses(value, turned=False) if turned_in(reader, place, turned) is None]
    if others:
        return f"its weight is also read by {others[0].op_type} {others[0].name or key(others[0])}"
    return "its weight is read both plain and transposed, or inside another node"


def _odd(node: ir.Node) -> bool:
    """Return True if operands other than the right one are transposed."""
    return any(integer(node, name) for name in ("transA", "transBatchA", "transBatchB"))


@dataclass(frozen=True, slots=True)
class Factored:
    """The replacement of a matrix.

    Attributes:
        up: name of the second weight, as the products read it.
        turned: it is stored transposed.
        between: per product, the name of the tensor between the two factors.
    """

    up: str
    turned: bool
    between: Mapping[str, str]


def factor(graph: ir.Graph, matrix: Matrix, down: Array, up: Array) -> Factored:
    """Replace a matrix by two factors; the second product is the old node, with its bias and name.

    Args:
        graph: changed in place.
        matrix: the matrix (m, n); its weight is removed.
        down: (m, k) first factor, rounded to the dtype of the weight.
        up: (k, n) second factor, rounded alike.
    """
    old = graph.initializers[matrix.weight]
    assert old.const_value is not None
    dtype = old.const_value.dtype
    turned = bool(integer(matrix.nodes[0], "transB"))
    first = constant(graph, down.astype(dtype.numpy()), f"{matrix.weight}/down", old=old)
    second = {}
    for way in {bool(integer(node, "transB")) for node in matrix.nodes}:
        second[way] = constant(graph, (up.T if way else up).astype(dtype.numpy()), f"{matrix.weight}/up", old=old)
    between = {}
    for node in matrix.nodes:
        source = given(node, 0)
        name = free_name(graph, f"{key(node)}/lowrank")
        made = ir.Node("", "MatMul", [source, first], num_outputs=1, name=name)
        made.metadata_props.update(node.metadata_props)
        value = made.outputs[0]
        value.name, value.type = name, ir.TensorType(dtype)
        if source.shape is not None and len(source.shape):
            value.shape = ir.Shape([*source.shape.dims[:-1], down.shape[1]])
        graph.insert_before(node, made)
        node.replace_input_with(0, value)
        node.replace_input_with(1, second[bool(integer(node, "transB"))])
        between[key(node)] = name
    swept(graph, old)
    return Factored(second[turned].name or "", turned, between)


def swept(graph: ir.Graph, value: ir.Value) -> None:
    """Remove a weight without readers, and its Transpose nodes."""
    for use in list(value.uses()):
        maker = use.node
        if maker.op_type == "Transpose" and not maker.outputs[0].is_graph_output():
            swept(graph, maker.outputs[0])
            if not list(maker.outputs[0].uses()):
                graph.remove(maker, safe=True)
    if value.name and not list(value.uses()) and value.name in graph.initializers:
        del graph.initializers[value.name]


def work(matrix: Matrix, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of rows that the products multiply on the probe feed; 0 if not known."""
    names = [key(node) for node in matrix.nodes]
    return sum(int(np.prod(shapes[name][:-1])) for name in names if name in shapes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Table:
    """A weight (rows, columns) and all of its readers.

    Attributes:
        weight: the initializer.
        lookups: the Gather nodes that take rows of it.
        products: the nodes that multiply by its transpose: a tied head.
    """

    weight: str
    lookups: tuple[ir.Node, ...]
    products: tuple[ir.Node, ...]

    def array(self, graph: ir.Graph) -> Array:
        """Return the numbers, (rows, columns)."""
        return numbers_of(graph.initializers[self.weight])


def tables(model: ir.Model) -> list[Table]:
    """Return every table whose readers are lookups of rows and products with its transpose."""
    found = []
    for name, tensor, readers in stored(model):
        taken = [node for node, place, turned in readers if node.op_type == "Gather" and (place, turned) == (0, False)]
        lookups = [node for node in taken if integer(node, "axis") in (0, -2)]
        multiplied = [node for node, place, turned in readers if turned_in(node, place, turned) is True]
        products = [n for n in multiplied if number(n, "alpha", 1.0) == number(n, "beta", 1.0) == 1.0]
        if lookups and len(lookups) + len(products) == len(readers) and not is_pairs(tensor):
            found.append(Table(weight=name, lookups=tuple(lookups), products=tuple(products)))
    return found
