"""How wide the heads of a key-value cache are where the input itself leaves it open, as those of genai models do."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.graph.attributes import integer

SLOTS = {"GroupQueryAttention": (3, 4), "MultiHeadAttention": (6, 7)}  # where attention takes the cache


def head_widths(model: ir.Model) -> dict[str, int]:
    """Sizes of named last dimensions of caches, as far as shapes recorded in the file tell them."""
    found: dict[str, int] = {}
    for value in model.graph.inputs:
        name = _open(value)
        if name is not None and "past" in (value.name or "").lower():
            sizes = [size for node, slot in value.uses() if (size := _told(node, slot))]
            if sizes:
                found[name] = sizes[0]
    return found


def _open(value: ir.Value) -> str | None:
    """Name of the last dimension of a cache, None where its size is known."""
    last = value.shape[-1] if value.shape is not None and len(value.shape) == 4 else None
    return last.value if isinstance(last, ir.SymbolicDim) and isinstance(last.value, str) else None


def _told(node: ir.Node, slot: int) -> int | None:
    """The size that a use of the cache asks for."""
    if slot in SLOTS.get(node.op_type, ()):
        query, heads = _last(node.inputs[0]), integer(node, "num_heads")
        packed = len(node.inputs) < 2 or node.inputs[1] is None
        parts = heads + 2 * integer(node, "kv_num_heads", heads) if packed else heads
        return query // parts if query is not None and parts else None
    others = (_last(v) for v in node.inputs if v is not node.inputs[slot]) if node.op_type == "Concat" else ()
    return next((size for size in others if size is not None), None)


def _last(value: ir.Value | None) -> int | None:
    """Size of the last axis, where it is written down."""
    size = value.shape[-1] if value is not None and value.shape is not None and len(value.shape) else None
    return size if isinstance(size, int) else None
