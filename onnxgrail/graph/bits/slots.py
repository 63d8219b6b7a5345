"""The inputs of layers that are weights, and the axes along which the numbers of a weight share a scale."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.attributes import MICROSOFT, integer

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
FUSED = {
    "Attention": (1,),
    "EmbedLayerNormalization": (2, 3, 4),
    "FusedConv": (1,),
    "FusedGemm": (1,),
    "FusedMatMul": (0, 1),
}  # of ONNX Runtime; the standard has another Attention, without weights
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
CONVOLUTIONS, TRANSPOSED = ("Conv", "FusedConv", "ConvTranspose"), "ConvTranspose"
PRODUCTS = ("MatMul", "FusedMatMul")


def slots_of(node: ir.Node) -> tuple[int, ...]:
    """Return the inputs of a node that can be weights of a layer or tables."""
    return SLOTS.get(node.op_type, FUSED.get(node.op_type, ()) if node.domain == MICROSOFT else ())


def axes_of(node: ir.Node, slot: int, value: ir.Value) -> tuple[int, ...] | None:
    """Return the axes of a weight that are summed over, or that a lookup takes as a whole; None if it is no weight."""
    rank = 0 if value.shape is None else len(value.shape)
    if rank < 2 or value.dtype not in FLOATS or slot not in slots_of(node):
        return None
    if node.op_type in CONVOLUTIONS:
        return tuple(axis for axis in range(rank) if axis != int(node.op_type == TRANSPOSED))
    if node.op_type in ("Gemm", "FusedGemm"):
        return (integer(node, "transB"),)
    if node.op_type in PRODUCTS:
        turned = bool(integer(node, "transB" if slot else "transA"))
        return (rank - 1 - int(bool(slot) != turned),)
    if node.op_type == "Attention":
        return (0,)
    return None if node.op_type == "Gather" and integer(node, "axis") else (rank - 1,)
