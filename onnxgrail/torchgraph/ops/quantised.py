"""Quantization operators.  Rounding has no gradient, so gradients end at a node that rounds."""

from __future__ import annotations

import torch

from onnxgrail.torchgraph.call import Call, Function, Tensor


def _spread(call: Call, x: Tensor, scale: Tensor) -> Tensor:
    """Broadcast a scale or zero point to the scaled tensor: one number, one per position, or one per block."""
    if scale.numel() == 1 and scale.ndim < 2:
        return scale.reshape(())
    axis, size = call.get("axis", 1), call.get("block_size", 0)
    if size:
        return scale.repeat_interleave(size, axis).narrow(axis, 0, x.shape[axis])
    return scale.reshape([-1 if a == axis % x.ndim else 1 for a in range(x.ndim)])


def _dequantise(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    centred = x.to(scale.dtype)
    if zero is not None:
        centred = centred - _spread(call, x, zero).to(scale.dtype)
    found = centred * _spread(call, x, scale)
    code = call.get("output_dtype", 0)
    return found.to(call.dtype(code)) if code else found


def _quantise(call: Call, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    code = call.get("output_dtype", 0)
    dtype = zero.dtype if zero is not None else call.dtype(code) if code else torch.uint8
    if dtype.is_floating_point:
        raise call.unsupported(f"type {dtype}")
    limits = torch.iinfo(dtype)
    places = torch.round(x / _spread(call, x, scale))
    if zero is not None:
        places = places + _spread(call, x, zero).to(places.dtype)
    return places.clamp(limits.min, limits.max).to(dtype)


def _dynamic(_: Call, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = (high - low) / 255
    zero = torch.round(-low / scale).clamp(0, 255)
    return (torch.round(x / scale) + zero).clamp(0, 255).to(torch.uint8), scale, zero.to(torch.uint8)


TABLE: dict[str, Function] = {
    "DequantizeLinear": _dequantise,
    "QuantizeLinear": _quantise,
    "DynamicQuantizeLinear": _dynamic,
}
