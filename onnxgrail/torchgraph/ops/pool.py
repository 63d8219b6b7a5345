"""Pooling operators."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as nn

from onnxgrail.torchgraph.call import Call, Function, Tensor
from onnxgrail.torchgraph.ops.conv import FORWARD, padded, sides

MAXIMA = (nn.max_pool1d, nn.max_pool2d, nn.max_pool3d)


Window = tuple[list[int], list[int], list[int]]  # kernel, strides and dilations


def _window(call: Call, x: Tensor) -> tuple[Window, list[tuple[int, int]]]:
    """Return kernel, strides, dilations, and pads, enlarged at the end if the last window exceeds the input."""
    kernel = list(call.get("kernel_shape"))
    strides, dilations = (list(call.get(name, [1] * len(kernel))) for name in ("strides", "dilations"))
    pads = sides(call, x.shape[2:], kernel)
    if call.get("ceil_mode", 0):
        for axis, (before, after) in enumerate(pads):
            reach = (kernel[axis] - 1) * dilations[axis] + 1
            size, stride = x.shape[axis + 2], strides[axis]
            count = math.ceil((size + before + after - reach) / stride) + 1
            if (count - 1) * stride >= size + before:  # a window that begins in the end padding does not count
                count -= 1
            pads[axis] = before, after + max((count - 1) * stride + reach - size - before - after, 0)
    return (kernel, strides, dilations), pads


def _max_pool(call: Call, x: Tensor) -> Tensor:
    if any(call.wanted[1:]):
        raise call.unsupported("with indices")
    (kernel, strides, dilations), pads = _window(call, x)
    numbers = x if x.is_floating_point() else x.float()
    lowest = -math.inf if x.is_floating_point() else float(torch.iinfo(x.dtype).min)
    function = MAXIMA[len(kernel) - 1]
    return function(padded(numbers, pads, lowest), kernel, strides, 0, dilations).to(x.dtype)


def _average_pool(call: Call, x: Tensor) -> Tensor:
    window, pads = _window(call, x)
    counted = torch.ones_like(x[:1, :1])
    if call.get("count_include_pad", 0):  # the model's padding counts, additional padding of ceil_mode does not
        own = sides(call, x.shape[2:], window[0])
        more = [(b - o, a - p) for (b, a), (o, p) in zip(pads, own, strict=True)]
        counted = padded(padded(counted, own, 1.0), more)
    else:
        counted = padded(counted, pads)
    return _total(padded(x, pads), window) / _total(counted, window)


def _total(x: Tensor, window: Window) -> Tensor:
    """Return the sum over every window of each channel."""
    kernel, strides, dilations = window
    ones = torch.ones((x.shape[1], 1, *kernel), dtype=x.dtype, device=x.device)
    return FORWARD[len(kernel) - 1](x, ones, None, strides, 0, dilations, x.shape[1])


def _lp_pool(call: Call, x: Tensor) -> Tensor:
    power = call.get("p", 2)
    window, pads = _window(call, x)
    return _total(padded(x.abs() ** power, pads), window) ** (1 / power)


def _spatial(x: Tensor) -> list[int]:
    return list(range(2, x.ndim))


TABLE: dict[str, Function] = {
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalAveragePool": lambda _, x: x.mean(_spatial(x), keepdim=True),
    "GlobalMaxPool": lambda _, x: x.amax(_spatial(x), keepdim=True),
    "GlobalLpPool": lambda call, x: (
        (x.abs() ** call.get("p", 2)).sum(_spatial(x), keepdim=True) ** (1 / call.get("p", 2))
    ),
}
