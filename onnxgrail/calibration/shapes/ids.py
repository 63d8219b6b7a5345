"""The number of rows of the constant table that an integer input indexes."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.attributes import integer, integers

PASS = frozenset(
    {
        "Cast",
        "Reshape",
        "Unsqueeze",
        "Squeeze",
        "Identity",
        "Flatten",
        "Transpose",
        "Expand",
        "Slice",
        "Concat",
        "Split",
        "Clip",
    }
)
SHIFT = frozenset({"Add", "Sub"})
ALTERING = frozenset({"Slice", "Split", "Clip"})  # downstream of them, not every value is looked up unchanged
LIMIT = 512  # nodes searched per input: lookups are close to the input


def table_rows(model: ir.Model, name: str, *, exact: bool = False) -> int | None:
    """Return the rows of the smallest constant table that an input indexes, directly or after casts, reshapes, offsets.

    With `exact`, only lookups of all its values count, so that a larger value is certainly an error.

    Returns:
        The number of ids that are valid for every lookup, or None if the input indexes no constant table.
    """
    start = next((v for v in model.graph.inputs if v.name == name), None)
    best: int | None = None
    queue, seen = [(start, 0)] if start is not None else [], 0
    while queue and seen < LIMIT:
        value, offset = queue.pop(0)
        for node, slot in value.uses():
            seen += 1
            rows = _looked_up(node, slot)
            if rows is not None:
                best = min(rows - offset, best) if best is not None else rows - offset
            elif exact and node.op_type in ALTERING:
                continue
            elif (node.op_type in PASS and slot == 0) or node.op_type == "Concat":
                queue.extend((out, offset) for out in node.outputs)
            elif node.op_type in SHIFT and len(node.inputs) == 2:
                shift = _integer(node.inputs[1 - slot])
                if shift is not None and (node.op_type == "Add" or slot == 0):
                    queue.append((node.outputs[0], offset + (shift if node.op_type == "Add" else -shift)))
    return best if best is not None and best > 0 else None


def _looked_up(node: ir.Node, slot: int) -> int | None:
    """Return the rows of the constant table if this use is a lookup; else None."""
    if node.op_type == "Gather" and slot == 1:
        return _size(node.inputs[0], integer(node, "axis"))
    if node.op_type == "GatherBlockQuantized" and slot == 1:
        return _size(node.inputs[0], integer(node, "gather_axis"))
    if node.op_type == "EmbedLayerNormalization" and slot in (0, 1) and len(node.inputs) > 4:
        return _size(node.inputs[2 if slot == 0 else 4], 0)
    return None


def _size(table: ir.Value | None, axis: int) -> int | None:
    """Return the length of an axis of a constant, which may be transposed, cast or dequantized first; else None."""
    for _ in range(8):
        if table is None:
            return None
        tensor = ir.convenience.get_const_tensor(table)
        if tensor is not None:
            shape = tensor.shape.numpy()
            return int(shape[axis]) if -len(shape) <= axis < len(shape) else None
        maker = table.producer()
        if maker is None or maker.op_type not in ("Cast", "Identity", "DequantizeLinear", "Transpose"):
            return None
        if maker.op_type == "Transpose":
            order = integers(maker, "perm")
            if not -len(order) <= axis < len(order):
                return None
            axis = order[axis]
        table = maker.inputs[0]
    return None


def _integer(value: ir.Value | None) -> int | None:
    """Return the value of a constant with one integer; else None."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is None or tensor.size != 1:
        return None
    array = tensor.numpy()
    return int(array.reshape(-1)[0]) if array.dtype.kind in "iu" else None
