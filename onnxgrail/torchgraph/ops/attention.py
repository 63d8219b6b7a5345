"""Attention and rotary embedding of the ONNX standard."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as nn

from onnxgrail.torchgraph.call import Call, Function, Tensor, filled


def split(x: Tensor, heads: int) -> Tensor:
    """Convert (batch, length, heads * size) to (batch, heads, length, size)."""
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """Convert (batch, heads, length, size) to (batch, length, heads * size)."""
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def grouped(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values for all query heads that share them."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def reach(queries: int, keys: int, offset: Tensor | int, left: int = -1, right: int = 0) -> Tensor:
    """Return the mask of keys that each query sees.

    Args:
        queries: number of queries.
        keys: number of keys.
        offset: position of the first query among the keys.
        left: maximum distance of earlier keys; -1 for any.
        right: maximum distance of later keys; -1 for any.
    """
    start = torch.as_tensor(offset)
    rows = torch.arange(queries)[:, None]
    ahead = torch.arange(keys)[None, :] - (rows + start.reshape(-1, 1, 1, 1) if start.ndim else rows + start)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if right >= 0:
        seen = seen & (ahead <= right)
    return seen & (ahead >= -left) if left >= 0 else seen


def hidden(seen: Tensor, dtype: torch.dtype, value: float = -math.inf) -> Tensor:
    """Return the bias of the scores: 0 for visible keys, `value` for hidden keys."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, value)


def softmax(scores: Tensor) -> Tensor:
    """Compute softmax; rows without a visible key give zeros and no gradient."""
    blind = torch.isneginf(scores).all(-1, keepdim=True)
    if not bool(blind.any()):
        return nn.softmax(scores, -1)
    return nn.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)


def _attention(call: Call, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    query, key, value, mask, past_key, past_value, lengths = filled(inputs, 7)
    flat = query.ndim == 3
    if flat:
        query = split(query, call.get("q_num_heads"))
        key, value = (split(t, call.get("kv_num_heads")) for t in (key, value))
    before = 0
    if past_key is not None and past_value is not None:
        before = past_key.shape[2]
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    half = math.sqrt(call.get("scale") or 1 / math.sqrt(query.shape[-1]))
    raw = (query * half) @ (grouped(key, query.shape[1]) * half).transpose(-1, -2)
    cap = call.get("softcap", 0.0)
    capped = cap * torch.tanh(raw / cap) if cap else raw
    scores = capped
    for bias in _biases(call, raw, mask, before, lengths):
        scores = scores + bias
    code = call.get("softmax_precision")
    weights = softmax(scores.to(call.dtype(code)) if code else scores).to(query.dtype)
    y = weights @ grouped(value, query.shape[1])
    steps = (raw, capped if cap else raw, scores, weights)
    return joined(y) if flat else y, key, value, steps[call.get("qk_matmul_output_mode", 0)]


def _biases(call: Call, raw: Tensor, mask: Tensor | None, before: int, lengths: Tensor | None) -> list[Tensor]:
    """Return all biases of the scores."""
    queries, keys = raw.shape[-2:]
    found = []
    if mask is not None:
        rest = keys - mask.shape[-1]
        if rest:
            mask = nn.pad(mask, [0, rest], value=False if mask.dtype == torch.bool else -math.inf)
        found.append(hidden(mask, raw.dtype) if mask.dtype == torch.bool else mask)
    offset: Any = before if lengths is None else lengths.flatten() - queries
    if call.get("is_causal", 0):
        found.append(hidden(reach(queries, keys, offset), raw.dtype))
    left, right = call.get("left_window_size", -1), call.get("right_window_size", -1)
    if left >= 0 or right >= 0:
        found.append(hidden(reach(queries, keys, offset, left, right), raw.dtype))
    if lengths is not None:
        found.append(hidden(torch.arange(keys) < lengths.reshape(-1, 1, 1, 1), raw.dtype))
    return found


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate (batch, length, heads, size) by angles (batch or 1, length, size / 2); channels without angles stay."""
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = cos * a - sin * b, sin * a + cos * b
    y = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([y, rest], -1) if rest.shape[-1] else y


def _rotary(call: Call, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> Tensor:
    flat = x.ndim == 3
    heads = x.reshape(x.shape[0], x.shape[1], call.get("num_heads"), -1) if flat else x.transpose(1, 2)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    half = (call.get("rotary_embedding_dim", 0) or heads.shape[-1]) // 2
    y = rotated(heads, cos[..., :half], sin[..., :half], interleaved=bool(call.get("interleaved", 0)))
    return y.reshape(x.shape) if flat else y.transpose(1, 2)


TABLE: dict[str, Function] = {"Attention": _attention, "RotaryEmbedding": _rotary}
