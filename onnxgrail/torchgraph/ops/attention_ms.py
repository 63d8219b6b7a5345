"""Fused attention operators of ONNX Runtime."""

from __future__ import annotations

import math

import torch

from onnxgrail.torchgraph.call import Call, Function, Tensor, filled
from onnxgrail.torchgraph.ops.attention import grouped, hidden, joined, reach, rotated, softmax, split


def _attended(
    call: Call, query: Tensor, key: Tensor, value: Tensor, biases: list[Tensor | None], softcap: float = 0.0
) -> Tensor:
    """Compute attention of (batch, heads, length, size) tensors; return (batch, length, width)."""
    scale = call.get("scale", 0.0) or 1 / math.sqrt(query.shape[-1])
    scores = scale * (query @ grouped(key, query.shape[1]).transpose(-1, -2))
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    for bias in biases:
        scores = scores if bias is None else scores + bias
    return joined(softmax(scores) @ grouped(value, query.shape[1]))


def _padding(call: Call, mask: Tensor | None, keys: int, dtype: torch.dtype) -> Tensor | None:
    """Return the bias of a key mask: (batch,) lengths, (batch, keys), or (batch, queries, keys)."""
    if mask is None:
        return None
    if mask.ndim == 1:
        mask = torch.arange(keys) < mask[:, None]
    if mask.ndim not in (2, 3):
        raise call.unsupported(f"a mask of rank {mask.ndim}")
    shown = mask.bool()[:, None, None, :] if mask.ndim == 2 else mask.bool()[:, None]
    return hidden(shown, dtype, call.get("mask_filter_value", -10000.0))


def _packed(call: Call, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Compute attention with query, key and value from one matrix product."""
    x, weight, bias, mask, past, added, _ = filled(inputs, 7)
    heads = call.get("num_heads")
    if call.get("do_rotary", 0):
        raise call.unsupported("with rotary positions")
    product = x @ weight if bias is None else x @ weight + bias
    sizes = call.get("qkv_hidden_sizes") or [product.shape[-1] // 3] * 3
    query, key, value = (split(t, heads) for t in product.split(list(sizes), -1))
    if past is not None:
        key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
    keys = key.shape[2]
    biases = [_padding(call, mask, keys, x.dtype), added]
    if call.get("unidirectional", 0):
        biases.append(hidden(reach(query.shape[2], keys, keys - query.shape[2]), x.dtype))
    y = _attended(call, query, key, value, biases)
    return (y, torch.stack([key, value])) if any(call.wanted[1:]) else (y,)


def _multi_head(call: Call, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    query, key, value, bias, mask, added, past_key, past_value, *more = filled(inputs, 8)
    if any(t is not None for t in more):
        raise call.unsupported("with a cache shared by beams")
    heads = call.get("num_heads")
    if query.ndim == 5:  # (batch, length, heads, 3, size)
        query, key, value = (query[:, :, :, k].flatten(2) for k in range(3))
    elif key is not None and key.ndim == 5:
        key, value = (key[:, :, :, k].flatten(2) for k in range(2))
    if key is None or value is None:
        raise call.unsupported("without keys or values")
    if bias is not None:
        widths = [query.shape[-1], query.shape[-1], bias.shape[0] - 2 * query.shape[-1]]
        one, two, three = bias.split(widths)
        query = query + one
        key, value = (key + two, value + three) if key.ndim == 3 else (key, value)
    query = split(query, heads)
    key, value = (split(t, heads) if t.ndim == 3 else t for t in (key, value))
    if past_key is not None and past_value is not None:
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    keys = key.shape[2]
    biases = [_padding(call, mask, keys, query.dtype), added]
    if call.get("unidirectional", 0):
        biases.append(hidden(reach(query.shape[2], keys, keys - query.shape[2]), query.dtype))
    return _attended(call, query, key, value, biases), key, value


def _group_query(call: Call, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Compute grouped-query attention for samples of equal past length; others are not implemented."""
    query, key, value, past_key, past_value, lengths, total, cos, sin, positions, added, *more = filled(inputs, 11)
    heads, groups = call.get("num_heads"), call.get("kv_num_heads")
    if any(t is not None for t in more) or call.get("smooth_softmax", 0):
        raise call.unsupported("with sinks or quantized caches")
    if key is None or value is None:
        size = query.shape[-1] // (heads + 2 * groups)
        query, key, value = query.split([heads * size, groups * size, groups * size], -1)
    count = query.shape[1]
    before = int(total) - count
    if before and bool((lengths.flatten() + 1 != int(total)).any()):
        raise call.unsupported("with pasts of several lengths")
    query, key, value = split(query, heads), split(key, groups), split(value, groups)
    if call.get("do_rotary", 0) and cos is not None and sin is not None:
        at = torch.arange(before, before + count)[None] if positions is None else positions
        both = {"interleaved": bool(call.get("rotary_interleaved", 0))}
        query, key = (rotated(t.transpose(1, 2), cos[at], sin[at], **both).transpose(1, 2) for t in (query, key))
    if before and past_key is not None and past_value is not None:
        key = torch.cat([past_key[:, :, :before], key], 2)
        value = torch.cat([past_value[:, :, :before], value], 2)
    keys = key.shape[2]
    # Keys after a sample's last token are padding, which only padded queries see.
    window = call.get("local_window_size", -1)
    seen = reach(count, keys, before, window - 1 if window > 0 else -1)
    biases = [hidden(seen, query.dtype), added]
    return _attended(call, query, key, value, biases, call.get("softcap", 0.0)), key, value


def _rotary(call: Call, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    flat = x.ndim == 3
    size = 2 * cos.shape[-1] if not call.get("num_heads", 0) else x.shape[-1] // call.get("num_heads")
    heads = x.reshape(x.shape[0], x.shape[1], -1, size) if flat else x.transpose(1, 2)
    count = heads.shape[1]
    at = positions if positions.ndim == 2 else positions.reshape(1, 1) + torch.arange(count)[None]
    y = rotated(heads, cos[at], sin[at], interleaved=bool(call.get("interleaved", 0)))
    return y.reshape(x.shape) if flat else y.transpose(1, 2)


TABLE: dict[str, Function] = {
    "Attention": _packed,
    "MultiHeadAttention": _multi_head,
    "GroupQueryAttention": _group_query,
    "RotaryEmbedding": _rotary,
}
