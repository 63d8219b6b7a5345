"""Softmax and normalization operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as nn

from onnxgrail.torchgraph.call import Call, Function, Tensor

SINGLE = 1  # stash_type: statistics in float32


def _rows(function: Callable[[Tensor, int], Tensor]) -> Function:
    """Return the operator of a function along an axis; before opset 13, all axes from that one on form one."""

    def along(call: Call, x: Tensor) -> Tensor:
        if call.version >= 13:
            return function(x, call.get("axis", -1))
        rows = math.prod(x.shape[: call.get("axis", 1) % x.ndim])
        return function(x.reshape(rows, -1), 1).reshape(x.shape)

    return along


def _hardmax(x: Tensor, axis: int) -> Tensor:
    return torch.zeros_like(x).scatter(axis, x.argmax(axis, keepdim=True), 1.0)


def _stashed(call: Call, x: Tensor) -> Tensor:
    """Return the input in the dtype used for statistics."""
    small = x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if small and call.get("stash_type", SINGLE) == SINGLE else x


def layer_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """Normalize over all axes from `axis` on; also return mean and inverse deviation if requested."""
    axis, epsilon = call.get("axis", -1) % x.ndim, call.get("epsilon", 1e-5)
    wide, axes = _stashed(call, x), list(range(axis, x.ndim))
    whole = scale.shape == x.shape[axis:] and (bias is None or bias.shape == scale.shape)
    if whole and wide is x and not any(call.wanted[1:]):
        return (nn.layer_norm(x, list(x.shape[axis:]), scale, bias, epsilon),)
    mean = wide.mean(axes, keepdim=True)
    inverse = torch.rsqrt((wide - mean).square().mean(axes, keepdim=True) + epsilon)
    y = ((wide - mean) * inverse).to(x.dtype) * scale
    return y if bias is None else y + bias, mean, inverse


def rms_norm(call: Call, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Normalize by the root mean square; the inverse root is the second output of the older form."""
    wide = _stashed(call, x)
    axes = list(range(call.get("axis", -1) % x.ndim, x.ndim))
    inverse = torch.rsqrt(wide.square().mean(axes, keepdim=True) + call.get("epsilon", 1e-5))
    return (wide * inverse).to(x.dtype) * scale, inverse


def _group_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    groups, epsilon = call.get("num_groups"), call.get("epsilon", 1e-5)
    if call.version < 21 and scale.numel() == groups:  # before opset 21, one number per group
        scale, bias = (t.repeat_interleave(x.shape[1] // groups) for t in (scale, bias))
    return nn.group_norm(x, groups, scale, bias, epsilon)


def _instance_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    axes = list(range(2, x.ndim))
    mean = x.mean(axes, keepdim=True)
    inverse = torch.rsqrt((x - mean).square().mean(axes, keepdim=True) + call.get("epsilon", 1e-5))
    shape = (1, -1, *[1] * len(axes))
    return (x - mean) * inverse * scale.reshape(shape) + bias.reshape(shape)


def _batch_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    if call.get("training_mode", 0) or any(call.wanted[1:]):
        raise call.unsupported("in training mode")
    if x.ndim < 2 or not mean.dtype == x.dtype == scale.dtype:
        shape = (1, -1, *[1] * (x.ndim - 2)) if x.ndim > 1 else (-1,)
        scale, bias, mean, variance = (t.reshape(shape).to(x.dtype) for t in (scale, bias, mean, variance))
        return (x - mean) * torch.rsqrt(variance + call.get("epsilon", 1e-5)) * scale + bias
    return nn.batch_norm(x, mean, variance, scale, bias, training=False, eps=call.get("epsilon", 1e-5))


def _lp_norm(call: Call, x: Tensor) -> Tensor:
    axis = call.get("axis", -1)
    power = call.get("p", 2)
    length = x.abs().sum(axis, keepdim=True) if power == 1 else x.square().sum(axis, keepdim=True).sqrt()
    return torch.where(length == 0, torch.zeros_like(x), x / length)


def _local_response(call: Call, x: Tensor) -> Tensor:
    size = call.get("size")
    before = (size - 1) // 2
    rows = x.square().flatten(2).transpose(1, 2)
    squares = nn.pad(rows, [before, size - 1 - before]).unfold(2, size, 1).sum(-1).transpose(1, 2).reshape(x.shape)
    return x / (call.get("bias", 1.0) + call.get("alpha", 1e-4) / size * squares) ** call.get("beta", 0.75)


def _mean_variance(call: Call, x: Tensor) -> Tensor:
    axes = list(call.get("axes", [0, 2, 3]))
    mean = x.mean(axes, keepdim=True)
    deviation = ((x * x).mean(axes, keepdim=True) - mean * mean).sqrt()
    return (x - mean) / (deviation + 1e-9)


def _dropout(call: Call, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None) -> Any:
    if training is not None and bool(training) and (ratio is None or float(ratio) > 0):
        raise call.unsupported("in training mode")
    return x, torch.ones_like(x, dtype=torch.bool)


TABLE: dict[str, Function] = {
    "Softmax": _rows(nn.softmax),
    "LogSoftmax": _rows(nn.log_softmax),
    "Hardmax": _rows(_hardmax),
    "LayerNormalization": layer_norm,
    "RMSNormalization": rms_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "BatchNormalization": _batch_norm,
    "LpNormalization": _lp_norm,
    "LRN": _local_response,
    "MeanVarianceNormalization": _mean_variance,
    "Dropout": _dropout,
}
