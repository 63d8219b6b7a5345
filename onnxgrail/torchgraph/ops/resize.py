"""Resize as a matrix per axis: in every mode, an output is a weighted sum of inputs along each axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onnxgrail.torchgraph.call import Call, Function, Tensor, numbers

ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "round_prefer_floor": lambda p: torch.ceil(p - 0.5),
    "round_prefer_ceil": lambda p: torch.floor(p + 0.5),
    "floor": torch.floor,
    "ceil": torch.ceil,
}


@dataclass(frozen=True, slots=True)
class _Axis:
    """The sizes of an axis before and after, their ratio, and the region of interest in relative units."""

    before: int
    after: int
    scale: float
    start: float
    end: float


def _resize(
    call: Call, x: Tensor, roi: Tensor | None = None, scales: Tensor | None = None, sizes: Tensor | None = None
) -> Tensor:
    if call.version < 11:
        roi, scales = None, roi
    axes = [a % x.ndim for a in call.get("axes", range(x.ndim))]
    region = numbers(roi) if roi is not None and roi.numel() else [0.0] * len(axes) + [1.0] * len(axes)
    y = x if x.is_floating_point() else x.to(torch.float64)
    for number, (axis, (after, scale)) in enumerate(zip(axes, _targets(call, x, axes, scales, sizes), strict=True)):
        if after == x.shape[axis] and scale == 1 and call.get("coordinate_transformation_mode") != "tf_crop_and_resize":
            continue
        one = _Axis(x.shape[axis], after, scale, region[number], region[number + len(axes)])
        matrix = _matrix(call, one)
        y = torch.tensordot(y, matrix.to(y.dtype), ([axis], [1])).movedim(-1, axis)
        if call.get("coordinate_transformation_mode") == "tf_crop_and_resize":
            y = _outside(call, y, one, axis)
    return y if x.is_floating_point() else y.round().to(x.dtype)


def _outside(call: Call, y: Tensor, axis: _Axis, along: int) -> Tensor:
    """Replace outputs outside of the input by the extrapolation value."""
    place = _places(call, axis)
    beyond = (place < 0) | (place > axis.before - 1)
    shape = [-1 if a == along else 1 for a in range(y.ndim)]
    value = torch.tensor(call.get("extrapolation_value", 0.0), dtype=y.dtype)
    return torch.where(beyond.reshape(shape), value, y)


def _targets(
    call: Call, x: Tensor, axes: list[int], scales: Tensor | None, sizes: Tensor | None
) -> list[tuple[int, float]]:
    """Return size and scale per axis."""
    if scales is not None and scales.numel():
        return [(math.floor(x.shape[a] * s), s) for a, s in zip(axes, numbers(scales), strict=True)]
    asked = numbers(sizes)
    policy = call.get("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return [(size, size / x.shape[a]) for a, size in zip(axes, asked, strict=True)]
    choose = min if policy == "not_larger" else max
    scale = choose(size / x.shape[a] for a, size in zip(axes, asked, strict=True))
    return [(math.floor(scale * x.shape[a] + 0.5), scale) for a in axes]


def _places(call: Call, axis: _Axis) -> Tensor:
    """Return the input coordinate of every output."""
    mode = call.get("coordinate_transformation_mode", "half_pixel" if call.version > 10 else "asymmetric")
    i = torch.arange(axis.after, dtype=torch.float64)
    if mode == "asymmetric":
        return i / axis.scale
    if mode == "align_corners":
        return i * (axis.before - 1) / (axis.after - 1) if axis.after > 1 else i * 0
    if mode == "tf_crop_and_resize":
        low, span = axis.start * (axis.before - 1), (axis.end - axis.start) * (axis.before - 1)
        return low + i * span / (axis.after - 1) if axis.after > 1 else low + span / 2 + i
    if mode == "pytorch_half_pixel":
        return (i + 0.5) / axis.scale - 0.5 if axis.after > 1 else i * 0
    if mode == "half_pixel_symmetric":
        exact = axis.scale * axis.before
        return axis.before / 2 * (1 - axis.after / exact) + (i + 0.5) / axis.scale - 0.5
    if mode == "half_pixel":
        return (i + 0.5) / axis.scale - 0.5
    raise call.unsupported(f"coordinates {mode}")


def _matrix(call: Call, axis: _Axis) -> Tensor:
    """Return the weights (after, before) of inputs in every output."""
    place, mode = _places(call, axis), call.get("mode", "nearest")
    matrix = torch.zeros(axis.after, axis.before, dtype=torch.float64)
    rows = torch.arange(axis.after)
    if mode == "nearest":
        near = ROUNDED[call.get("nearest_mode", "round_prefer_floor" if call.version > 10 else "floor")](place)
        matrix[rows, near.long().clamp(0, axis.before - 1)] = 1.0
        return matrix
    cubic = mode == "cubic"
    stretch = max(1 / axis.scale, 1.0) if call.get("antialias", 0) else 1.0
    reach = math.ceil((2 if cubic else 1) * stretch)
    first = torch.floor(place).long() - reach + 1
    for offset in range(2 * reach):
        source = first + offset
        distance = ((source - place) / stretch).abs()
        weight = _cubic(distance, call.get("cubic_coeff_a", -0.75)) if cubic else (1 - distance).clamp(min=0)
        if call.get("exclude_outside", 0):
            weight = torch.where((source < 0) | (source >= axis.before), torch.zeros_like(weight), weight)
        matrix.index_put_((rows, source.clamp(0, axis.before - 1)), weight, accumulate=True)
    return matrix / matrix.sum(1, keepdim=True)


def _cubic(d: Tensor, a: float) -> Tensor:
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))


def _upsample(call: Call, x: Tensor, scales: Tensor | None = None) -> Tensor:
    wanted = torch.tensor(call.get("scales", call.get("height_scale"))) if scales is None else scales
    return _resize(call, x, wanted)


TABLE: dict[str, Function] = {"Resize": _resize, "Upsample": _upsample}
