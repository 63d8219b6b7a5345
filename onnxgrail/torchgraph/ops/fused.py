"""Fused operators of ONNX Runtime other than attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn import functional as nn

from onnxgrail.torchgraph.call import Call, Function, Tensor, filled
from onnxgrail.torchgraph.ops.norm import layer_norm, rms_norm

EPSILON = 1e-12  # default of skip and embedding normalization


def _matmul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices that may be transposed.

    With `transBatch`, the batch axis lies between rows and columns.
    """

    def turned(x: Tensor, batch: bool, flip: bool) -> Tensor:
        x = x.movedim(0, -2) if batch and x.ndim > 2 else x
        return x.transpose(-1, -2) if flip and x.ndim > 1 else x

    left = turned(a, bool(call.get("transBatchA", 0)), bool(call.get("transA", 0)))
    right = turned(b, bool(call.get("transBatchB", 0)), bool(call.get("transB", 0)))
    alpha = call.get("alpha", 1.0)
    return left @ right if alpha == 1 else alpha * (left @ right)


def _normed(norm: Function, call: Call, x: Tensor, *weights: Tensor | None) -> Any:
    """Normalize by an operator of the standard with this node's epsilon; of its outputs only the first is used."""
    attributes = {"epsilon": EPSILON, **call.attributes}
    return norm(dataclasses.replace(call, attributes=attributes, wanted=(True,)), x, *weights)[0]


def _skip_norm(call: Call, x: Tensor, skip: Tensor, scale: Tensor, *rest: Tensor | None) -> tuple[Tensor | None, ...]:
    plain = call.op == "SkipSimplifiedLayerNormalization"  # has no shift
    shift, bias = filled([None, *rest] if plain else rest, 2)
    total = x + skip if bias is None else x + skip + bias
    weights = (scale,) if plain else (scale, shift)
    return _normed(rms_norm if plain else layer_norm, call, total, *weights), None, None, total


def _embed(call: Call, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    ids, segments, words, places, kinds, scale, shift, mask, positions = filled(inputs, 9)
    at = torch.arange(ids.shape[1]).expand(ids.shape) if positions is None else positions.long()
    total = words[ids.long()] + places[at]
    if kinds is not None and segments is not None:
        total = total + kinds[segments.long()]
    y = _normed(layer_norm, call, total, scale, shift)
    count = torch.zeros(len(ids), dtype=torch.int32) if mask is None else mask.sum(1).to(torch.int32)
    return y, count, total


TABLE: dict[str, Function] = {
    "FusedMatMul": _matmul,
    "TransposeMatMul": _matmul,
    "SkipLayerNormalization": _skip_norm,
    "SkipSimplifiedLayerNormalization": _skip_norm,
    "EmbedLayerNormalization": _embed,
    "Gelu": lambda _, x: nn.gelu(x),
    "BiasGelu": lambda _, x, bias: nn.gelu(x + bias),
    "FastGelu": lambda _, x, bias=None: nn.gelu(x if bias is None else x + bias, approximate="tanh"),
    "QuickGelu": lambda call, x: x * torch.sigmoid(call.get("alpha", 1.702) * x),
}
