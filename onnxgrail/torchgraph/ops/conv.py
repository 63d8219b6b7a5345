"""Convolutions, and padding, which pooling uses too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as nn

from onnxgrail.torchgraph.call import Call, Function, Tensor

FORWARD = (torch.conv1d, torch.conv2d, torch.conv3d)
TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


def sides(call: Call, sizes: Sequence[int], kernel: Sequence[int]) -> list[tuple[int, int]]:
    """Return the padding before and after, per spatial axis."""
    rank = len(sizes)
    auto = call.get("auto_pad", "NOTSET")
    if auto in ("NOTSET", ""):
        pads = call.get("pads", [0] * (2 * rank))
        return list(zip(pads[:rank], pads[rank:], strict=True))
    if auto == "VALID":
        return [(0, 0)] * rank
    strides, dilations = (call.get(name, [1] * rank) for name in ("strides", "dilations"))
    found = []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        less, more = total // 2, total - total // 2
        found.append((less, more) if auto == "SAME_UPPER" else (more, less))
    return found


def padded(x: Tensor, pads: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """Pad the spatial axes with a constant value."""
    if not any(any(pair) for pair in pads):
        return x
    return nn.pad(x, [side for pair in reversed(pads) for side in pair], value=value)


def conv(call: Call, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Compute a convolution with one to three spatial axes."""
    rank = x.ndim - 2
    if not 1 <= rank <= len(FORWARD):
        raise call.unsupported(f"{rank} spatial axes")
    pads = sides(call, x.shape[2:], w.shape[2:])
    even = all(before == after for before, after in pads)
    x = x if even else padded(x, pads)
    strides, dilations = (call.get(name, [1] * rank) for name in ("strides", "dilations"))
    return FORWARD[rank - 1](x, w, b, strides, [p for p, _ in pads] if even else 0, dilations, call.get("group", 1))


def _conv_transpose(call: Call, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Compute a transposed convolution: the full output first, then crop the pads."""
    rank = x.ndim - 2
    strides, dilations = (call.get(name, [1] * rank) for name in ("strides", "dilations"))
    extra = call.get("output_padding", [0] * rank)
    y = TRANSPOSED[rank - 1](x, w, b, strides, 0, 0, call.get("group", 1), dilations)
    for axis, (before, size) in enumerate(_spans(call, x, w, strides, dilations, extra)):
        whole = y.shape[axis + 2]
        if before + size > whole:  # output padding exceeds the full output: only the bias is there
            y = _grown(y, axis + 2, before + size - whole, b)
        y = y.narrow(axis + 2, before, size)
    return y


def _grown(y: Tensor, axis: int, count: int, b: Tensor | None) -> Tensor:
    shape = list(y.shape)
    shape[axis] = count
    base = torch.zeros((), dtype=y.dtype, device=y.device) if b is None else b.reshape(-1, *[1] * (y.ndim - 2))
    return torch.cat([y, base.expand(shape)], axis)


def _spans(
    call: Call, x: Tensor, w: Tensor, strides: list[int], dilations: list[int], extra: list[int]
) -> list[tuple[int, int]]:
    """Return, per axis, the start and size of the cropped part of the full output."""
    rank = x.ndim - 2
    pads = call.get("pads", [0] * (2 * rank))
    auto, asked = call.get("auto_pad", "NOTSET"), call.get("output_shape")
    same = auto in ("SAME_UPPER", "SAME_LOWER")
    found = []
    for axis in range(rank):
        reach = (w.shape[axis + 2] - 1) * dilations[axis] + 1
        whole = (x.shape[axis + 2] - 1) * strides[axis] + reach + extra[axis]
        if not same and asked is None:
            found.append((pads[axis], whole - pads[axis] - pads[axis + rank]))
            continue
        size = asked[-rank:][axis] if asked is not None else x.shape[axis + 2] * strides[axis]
        total = whole - size
        found.append((total // 2 if auto == "SAME_UPPER" else total - total // 2, size))
    return found


TABLE: dict[str, Function] = {"Conv": conv, "ConvTranspose": _conv_transpose}
