"""The head width of key-value caches whose input leaves it open, as in onnxruntime-genai models."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.attributes import integer

SLOTS = {"GroupQueryAttention": (3, 4), "MultiHeadAttention": (6, 7)}  # input positions of the cache


def head_widths(model: ir.Model) -> dict[str, int]:
    """Return the sizes of named last dimensions of caches, as far as shapes recorded in the file determine them."""
    found: dict[str, int] = {}
    for value in model.graph.inputs:
        name = _open(value)
        if name is not None and "past" in (value.name or "").lower():
            sizes = [size for node, slot in value.uses() if (size := _told(node, slot))]
            if sizes:
                found[name] = sizes[0]
    return found


def _open(value: ir.Value) -> str | None:
    """Return the name of the last dimension of a cache; None if its size is fixed."""
    last = value.shape[-1] if value.shape is not None and len(value.shape) == 4 else None
    return last.value if isinstance(last, ir.SymbolicDim) and isinstance(last.value, str) else None


def _told(node: ir.Node, slot: int) -> int | None:
    """Return the head width that a node requires of the cache; None if the node does not determine it."""
    if slot in SLOTS.get(node.op_type, ()):
        query, heads = _last(node.inputs[0]), integer(node, "num_heads")
        packed = len(node.inputs) < 2 or node.inputs[1] is None
        parts = heads + 2 * integer(node, "kv_num_heads", heads) if packed else heads
        return query // parts if query is not None and parts else None
    others = (_last(v) for v in node.inputs if v is not node.inputs[slot]) if node.op_type == "Concat" else ()
    return next((size for size in others if size is not None), None)


def _last(value: ir.Value | None) -> int | None:
    """Return the size of the last axis; None if it is not recorded."""
    size = value.shape[-1] if value is not None and value.shape is not None and len(value.shape) else None
    return size if isinstance(size, int) else None
