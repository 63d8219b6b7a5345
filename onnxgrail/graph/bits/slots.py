"""The inputs of layers that are weights, and the axes along which the numbers of a weight share a scale."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.attributes import MICROSOFT, integer, is_read

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
    "FusedMatMul": (0, 1),
}  # of ONNX Runtime; the standard has another Attention, without weights
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
PASSING = ("Concat", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
LOOP = "Loop"
CONVOLUTIONS, TRANSPOSED = ("Conv", "ConvTranspose"), "ConvTranspose"
PRODUCTS = ("MatMul", "FusedMatMul")


def slots_of(node: ir.Node) -> tuple[int, ...]:
    """Return the inputs of a node that can be weights of a layer or tables."""
    return SLOTS.get(node.op_type, FUSED.get(node.op_type, ()) if node.domain == MICROSOFT else ())


def axes_of(node: ir.Node, slot: int, value: ir.Value) -> tuple[int, ...] | None:
    """Return the axes of a weight that are summed over, or that a lookup takes as a whole; None if it is no weight.

    They are not known, and the last axis is taken, if nodes take a weight apart or turn it before a layer reads it.
    """
    rank = 0 if value.shape is None else len(value.shape)
    if rank < 2 or value.dtype not in FLOATS:
        return None
    if slot not in slots_of(node):
        return (rank - 1,) if node.op_type in (*PASSING, LOOP) else None
    if node.op_type in CONVOLUTIONS:
        return tuple(axis for axis in range(rank) if axis != int(node.op_type == TRANSPOSED))
    if node.op_type in ("Gemm", "Attention"):
        return (integer(node, "transB"),)
    if node.op_type in PRODUCTS:
        turned = bool(integer(node, "transB" if slot else "transA"))
        return (rank - 1 - int(bool(slot) != turned),)
    return None if node.op_type == "Gather" and integer(node, "axis") else (rank - 1,)


def only_layers(value: ir.Value) -> bool:
    """Return True if only layers read a constant as their weights, if need be taken apart or turned before."""
    for node, slot in value.uses():
        if slot in slots_of(node):
            continue
        if node.op_type == LOOP:
            if not _carried(node, slot):
                return False
            continue
        others = (other for other in node.inputs if other is not None and other is not value)
        if node.op_type not in PASSING or value.is_graph_output() or not all(_constant(other) for other in others):
            return False
        if not only_layers(node.outputs[0]):
            return False
    return not value.is_graph_output()


def _carried(node: ir.Node, slot: int) -> bool:
    """Return True if a loop only hands a weight on from step to step, and only layers in its body read it."""
    body = node.attributes["body"].as_graph()
    state = slot - 2  # after the number of steps and the condition
    if state < 0 or is_read(node.outputs[state]):
        return False
    inside, end = body.inputs[slot], body.outputs[slot - 1]
    maker = end.producer()
    same = maker is not None and maker.op_type == "Identity" and maker.inputs[0] is inside and not end.uses()
    return (end is inside or same) and all(
        one in slots_of(reader)
        or (same and reader is maker)
        or (reader.op_type in PASSING and only_layers(reader.outputs[0]))
        for reader, one in inside.uses()
    )


def _constant(value: ir.Value) -> bool:
    """Return True for a constant, and for what passing nodes make of constants."""
    maker = value.producer()
    if maker is None:
        return value.const_value is not None and not value.is_graph_input()
    if maker.op_type == "Constant":  # a small one in a branch
        return True
    return maker.op_type in PASSING and all(_constant(other) for other in maker.inputs if other is not None)
