"""Find the initializers that are trainable weights, and the tensors that depend on them.

A weight is an operand of a product, or a vector that scales or shifts the result of one.  All other stored floats
stay unchanged: tables of angles, masks, sizes, running statistics, embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxgrail.graph.trace.facts import captures

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
PASSING = frozenset(
    {"Identity", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Cast"}
)  # between a weight and its use

# Operands that are matrices or filters; operands that are biases or scales.
MATRICES = {
    "MatMul": (0, 1), "FusedMatMul": (0, 1), "Gemm": (0, 1), "Conv": (1,),
    "ConvTranspose": (1,), "Attention": (1,),
}  # fmt: skip
VECTORS = {
    "Gemm": (2,), "Conv": (2,), "ConvTranspose": (2,), "Attention": (2,),
    "MultiHeadAttention": (3,), "Add": (0, 1), "Mul": (0, 1), "Sub": (0, 1), "BiasGelu": (1,), "FastGelu": (1,),
    "PRelu": (1,), "LayerNormalization": (1, 2), "RMSNormalization": (1,), "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3, 4), "SkipSimplifiedLayerNormalization": (2, 3), "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2), "BatchNormalization": (1, 2),
}  # fmt: skip
TABLES = {"Gather": (0,), "EmbedLayerNormalization": (2, 3, 4)}  # learned, but not changed
PACKED = frozenset({"Attention"})  # ONNX Runtime's op; the standard Attention has no weights


@dataclass(frozen=True, slots=True, eq=False)
class Trainable:
    """The trainable weights of a graph.

    Attributes:
        readers: per weight the positions of the nodes that compute with it; it has no other readers.
        matrices: the weights that are operands of products.
        carriers: activations that depend on a weight or an embedding, and inputs that a weight multiplies.
    """

    readers: Mapping[str, tuple[int, ...]]
    matrices: frozenset[str]
    carriers: frozenset[str]

    def within(self, begin: int, end: int) -> list[str]:
        """Return the weights that are read in this range of nodes only."""
        return [n for n, places in self.readers.items() if all(begin <= p < end for p in places)]


def trainable(model: ir.Model) -> Trainable:
    """Find the weights of a graph in one pass over its nodes."""
    places: dict[str, list[int]] = {}
    matrices: set[str] = set()
    carriers: set[str] = set()
    for position, node in enumerate(model.graph):
        carried = any(v is not None and v.name in carriers for v in node.inputs)
        learnt = bool(carried)
        for number, value in enumerate(node.inputs):
            source = _weight(value)
            weight = source.name if source is not None else None
            if source is None or weight is None:
                continue
            if number in _matrices(node) and _is_matrix(source):
                learnt = True
                matrices.add(weight)
                carriers.update(v.name for v in node.inputs if v is not None and v.name and v.is_graph_input())
                places.setdefault(weight, []).append(position)
            elif number in VECTORS.get(node.op_type, ()) and _is_vector(weight, model) and (carried or learnt):
                places.setdefault(weight, []).append(position)
            elif number in TABLES.get(node.op_type, ()):
                learnt = True
        if learnt and node.op_type not in ("Shape", "Size", "ArgMax", "ArgMin"):
            carriers.update(v.name for v in node.outputs if v.name)
    fixed = {name for node in model.graph for name in captures(node)}
    found = {
        name: tuple(used)
        for name, used in places.items()
        if name not in fixed and len(used) == sum(1 for _ in _uses(model.graph.initializers[name]))
    }
    return Trainable(found, frozenset(matrices & found.keys()), frozenset(carriers))


def _matrices(node: ir.Node) -> tuple[int, ...]:
    if node.op_type in PACKED and not node.domain:
        return ()
    return MATRICES.get(node.op_type, ())


def _weight(value: ir.Value | None) -> ir.Value | None:
    """Return the initializer that an operand is or is made from by moving elements; None if there is none."""
    while value is not None:
        node = value.producer()
        if node is None:
            known = value.const_value is not None and value.is_initializer() and not value.is_graph_input()
            usable = known and value.dtype in FLOATS and not value.is_graph_output()
            return value if usable else None
        if node.op_type not in PASSING or value.is_graph_output():
            return None
        value = node.inputs[0]
    return None


def _is_matrix(weight: ir.Value) -> bool:
    """Return True if at least two axes of an initializer are larger than 1."""
    shape = weight.const_value.shape if weight.const_value is not None else ()
    return sum(1 for size in shape if size != 1) > 1


def _is_vector(name: str, model: ir.Model) -> bool:
    """Return True for one number per channel: masks and tables have more axes."""
    tensor = model.graph.initializers[name].const_value
    return tensor is not None and tensor.size > 1 and sum(1 for size in tensor.shape if size != 1) == 1


def _uses(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Yield every operand that reads an initializer, also through nodes that only move its elements."""
    for use in value.uses():
        if use.node.op_type in PASSING and use.idx == 0:
            yield from _uses(use.node.outputs[0])
        else:
            yield use.node, use.idx
