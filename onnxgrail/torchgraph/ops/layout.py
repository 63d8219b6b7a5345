"""Operators that rearrange elements without arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as nn

from onnxgrail.torchgraph.call import Call, Function, Tensor, numbers


def _reshape(call: Call, x: Tensor, shape: Tensor | None = None) -> Tensor:
    sizes = list(call.get("shape", ())) if shape is None else numbers(shape)
    if not call.get("allowzero", 0):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(call: Call, x: Tensor) -> Tensor:
    axis = call.get("axis", 1)
    axis += x.ndim if axis < 0 else 0
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _squeeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = call.get("axes") if axes is None else numbers(axes)
    return x.squeeze() if chosen is None else x.squeeze(tuple(chosen))


def _unsqueeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = call.get("axes") if axes is None else numbers(axes)
    rank = x.ndim + len(chosen)
    for axis in sorted(a % rank for a in chosen):
        x = x.unsqueeze(axis)
    return x


def _split(call: Call, x: Tensor, sizes: Tensor | None = None) -> Sequence[Tensor]:
    axis = call.get("axis", 0)
    parts = call.get("split") if sizes is None else numbers(sizes)
    if parts is None:
        count = call.get("num_outputs", call.outputs)
        each = math.ceil(x.shape[axis] / count)
        parts = [each] * (count - 1) + [x.shape[axis] - each * (count - 1)]
    pieces: Sequence[Tensor] = torch.split(x, parts, axis)
    return pieces


def _slice(
    call: Call,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    first = call.get("starts") if starts is None else numbers(starts)
    last = call.get("ends") if ends is None else numbers(ends)
    along = call.get("axes", range(len(first))) if axes is None else numbers(axes)
    by = [1] * len(first) if steps is None else numbers(steps)
    for start, end, axis, step in zip(first, last, along, by, strict=True):
        size = x.shape[axis]
        # An end far below zero means before the first element, which Python writes as None.
        places = range(*slice(start, None if step < 0 and end < -size else end, step).indices(size))
        if step > 0:
            x = x[(slice(None),) * (axis % x.ndim) + (slice(places.start, max(places.stop, places.start), step),)]
        else:
            x = x.index_select(axis, torch.tensor(list(places), dtype=torch.int64, device=x.device))
    return x


def _reflected(place: Tensor, size: int) -> Tensor:
    turn = 2 * size - 2
    return (size - 1) - ((place % turn) - (size - 1)).abs() if size > 1 else place * 0


MODES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "edge": lambda place, size: place.clamp(0, size - 1),
    "wrap": lambda place, size: place % size,
    "reflect": _reflected,
}


def _pad(
    call: Call, x: Tensor, pads: Tensor | None = None, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    sizes = call.get("pads", call.get("paddings")) if pads is None else numbers(pads)
    along = range(x.ndim) if axes is None else [a % x.ndim for a in numbers(axes)]
    both = [(0, 0)] * x.ndim
    for number, axis in enumerate(along):
        both[axis] = sizes[number], sizes[number + len(along)]
    mode = call.get("mode", "constant")
    if mode == "constant":
        fill = call.get("value", 0.0) if value is None else value.item()
        return nn.pad(x, [side for pair in reversed(both) for side in pair], value=fill)
    for axis, (before, after) in enumerate(both):
        if before or after:
            place = torch.arange(-before, x.shape[axis] + after, device=x.device)
            x = x.index_select(axis, MODES[mode](place, x.shape[axis]))
    return x


def _depth_to_space(call: Call, x: Tensor) -> Tensor:
    size = call.get("blocksize")
    n, c, h, w = x.shape
    if call.get("mode", "DCR") != "DCR":
        return nn.pixel_shuffle(x, size)
    cells = x.reshape(n, size, size, c // size**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return cells.reshape(n, c // size**2, h * size, w * size)


def _space_to_depth(call: Call, x: Tensor) -> Tensor:
    size = call.get("blocksize")
    n, c, h, w = x.shape
    if call.get("mode", "DCR") != "DCR":
        return nn.pixel_unshuffle(x, size)
    cells = x.reshape(n, c, h // size, size, w // size, size).permute(0, 3, 5, 1, 2, 4)
    return cells.reshape(n, c * size**2, h // size, w // size)


def _center_crop_pad(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    axes = call.get("axes", range(x.ndim))
    for axis, size in zip(axes, numbers(shape), strict=True):
        more = size - x.shape[axis]
        if more > 0:
            sides = [0, 0] * x.ndim
            place = 2 * (x.ndim - 1 - axis % x.ndim)
            sides[place], sides[place + 1] = more // 2, more - more // 2
            x = nn.pad(x, sides)
        else:
            x = x.narrow(axis, -more // 2, size)
    return x


def _reverse(call: Call, x: Tensor, lengths: Tensor) -> Tensor:
    time, batch = call.get("time_axis", 0), call.get("batch_axis", 1)
    count = x.shape[time]
    step = torch.arange(count, device=x.device)[:, None]
    source = torch.where(step < lengths, lengths - 1 - step, step)
    shape = [1] * x.ndim
    shape[time], shape[batch] = source.shape
    source = source if time < batch else source.T
    return x.gather(time, source.reshape(shape).expand(x.shape))


TABLE: dict[str, Function] = {
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": lambda call, x: x.permute(call.get("perm", list(range(x.ndim))[::-1])),
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": lambda call, *inputs: torch.cat(inputs, call.get("axis", 1)),
    "Split": _split,
    "Slice": _slice,
    "Expand": lambda _, x, shape: x.expand(torch.broadcast_shapes(x.shape, tuple(numbers(shape)))),
    "Tile": lambda _, x, repeats: x.repeat(numbers(repeats)),
    "Trilu": lambda call, x, k=None: (torch.triu if call.get("upper", 1) else torch.tril)(x, int(k or 0)),
    "Pad": _pad,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "CenterCropPad": _center_crop_pad,
    "ReverseSequence": _reverse,
}
