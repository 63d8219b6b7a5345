"""Store float weights in 8 or 16 bits that a runtime converts once, when it loads the model.

ONNX Runtime computes the `DequantizeLinear` of a constant weight again in each run.  It folds `Cast` and `Mul` of
constants, so the layers that read them compute in float32, as fast as before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxgrail.core import Array
from onnxgrail.graph.attributes import integer
from onnxgrail.graph.ops.tensors.cut import constant
from onnxgrail.graph.rewrite.unique import names_kept

SLOTS = {
    "Conv": (1,),
    "ConvTranspose": (1,),
    "Gemm": (1,),
    "MatMul": (0, 1),
    "Gather": (0,),
    "LSTM": (1, 2),
    "GRU": (1, 2),
    "RNN": (1, 2),
}
TOP = 127
NODES, NAMES = 120, 9  # bytes of the nodes and tensors that replace a weight, and how often they repeat its name
LARGEST = float(np.finfo(np.float16).max)
CODES = (ir.DataType.INT8, ir.DataType.UINT8)


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A float weight that can be stored in 8 bits.

    Attributes:
        value: the initializer.
        layer: name of the first node that reads it.
        axes: the axes along which numbers share a scale.
    """

    value: ir.Value
    layer: str
    axes: tuple[int, ...]

    @property
    def array(self) -> Array:
        """The numbers."""
        assert self.value.const_value is not None
        return self.value.const_value.numpy()


def weights_of(model: ir.Model) -> list[Weight]:
    """Return the float weights of layers that take fewer bytes in 8 bits, in the order of the model."""
    found: dict[ir.Value, Weight] = {}
    for node in model.graph:
        for slot in SLOTS.get(node.op_type, ()):
            value = node.inputs[slot] if slot < len(node.inputs) else None
            axes = None if value is None else _axes(node, slot, value)
            if value is not None and axes and value not in found and _smaller(value, axes):
                found[value] = Weight(value, node.name or "", axes)
    return [weight for weight in found.values() if np.isfinite(weight.array).all()]


def folded(model: ir.Model, half: Collection[str] = ()) -> ir.Model:
    """Return a copy whose float weights are stored as int8 with a scale per channel, or in half precision.

    Args:
        model: the graph; not changed.
        half: names of layers whose weights have half precision; those that would overflow stay in float32.
    """
    made = model.clone()
    graph = made.graph
    with names_kept(graph):
        for weight in weights_of(made):
            name, array = weight.value.name or "", weight.array
            if weight.layer not in half:
                codes, scale = rounded(array, weight.axes)
                number = _node(graph, "Cast", [constant(graph, codes, f"{name}/8")], to=ir.DataType.FLOAT)
                number = _node(graph, "Mul", [number, constant(graph, scale, f"{name}/s")])
            elif np.abs(array).max() <= LARGEST:
                number = _node(graph, "Cast", [constant(graph, array.astype(np.float16), f"{name}/16")], to=1)
            else:
                continue
            weight.value.replace_all_uses_with(number)
            del graph.initializers[name]
            number.name, number.shape = name, weight.value.shape
    graph.sort()
    return made


def rounded(array: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the codes of an array as int8, and the scales; their product is nearest to the array."""
    scale = np.abs(array).max(axis=axes, keepdims=True) / np.float32(TOP)
    scale[scale == 0] = 1
    return np.clip(np.rint(array / scale), -TOP, TOP).astype(np.int8), scale


def is_folded(model: ir.Model) -> bool:
    """Return True if a weight is a constant of 8 bits that a `Cast` turns into floats."""
    constants = model.graph.initializers.values()
    codes = (value for value in constants if value.dtype in CODES and not value.is_graph_input())
    return any(use.node.op_type == "Cast" for value in codes for use in value.uses())


def _axes(node: ir.Node, slot: int, value: ir.Value) -> tuple[int, ...] | None:
    """Return the axes of a weight that are summed over, or that a lookup takes as a whole; None if it is no weight."""
    rank = 0 if value.shape is None else len(value.shape)
    if rank < 2 or value.dtype != ir.DataType.FLOAT:
        return None
    if node.op_type in ("Conv", "ConvTranspose"):
        return tuple(axis for axis in range(rank) if axis != int(node.op_type == "ConvTranspose"))
    if node.op_type == "Gemm":
        return (integer(node, "transB"),)
    if node.op_type == "MatMul":
        return (rank - 1 - slot,)
    return None if node.op_type == "Gather" and integer(node, "axis") else (rank - 1,)


def _smaller(value: ir.Value, axes: tuple[int, ...]) -> bool:
    """Return True if a constant that only layers read takes fewer bytes in 8 bits."""
    if value.const_value is None or value.is_graph_input() or value.is_graph_output() or value.producer() is not None:
        return False
    if any(use.idx not in SLOTS.get(use.node.op_type, ()) for use in value.uses()):
        return False
    size, shape = value.const_value.size, value.const_value.shape.numpy()
    scales = size // max(1, int(np.prod([shape[axis] for axis in axes])))
    return 3 * size - 4 * scales > NODES + NAMES * len(value.name or "")


def _node(graph: ir.Graph, op: str, inputs: list[ir.Value], to: int | None = None) -> ir.Value:
    """Append a node that computes float32; return its output."""
    node = ir.Node("", op, inputs, [] if to is None else [ir.AttrInt64("to", int(to))])
    value = node.outputs[0]
    value.name, value.type, value.shape = f"{inputs[0].name}/f", ir.TensorType(ir.DataType.FLOAT), inputs[0].shape
    graph.append(node)
    return value
