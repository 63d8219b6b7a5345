"""Reductions, cumulative sums and products, ArgMax, ArgMin and TopK."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from onnxgrail.torchgraph.call import Call, Function, Tensor, numbers

Reduction = Callable[[Tensor, list[int], bool], Tensor]


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(axes, keepdim=keep)
    return torch.div(x.sum(axes, keepdim=keep), math.prod(x.shape[a] for a in axes), rounding_mode="trunc").to(x.dtype)


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _extreme(function: Callable[..., Tensor], sign: float) -> Reduction:
    """Return a maximum or minimum; of an empty tensor, infinity or the extreme value of its dtype."""

    def reduce(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        if x.dtype == torch.bool:
            return reduce(x.to(torch.uint8), axes, keep).to(torch.bool)
        if x.numel():
            return function(x, axes, keepdim=keep)
        worst = (
            sign * math.inf if x.is_floating_point() else getattr(torch.iinfo(x.dtype), "max" if sign > 0 else "min")
        )
        return torch.full_like(x.sum(axes, keepdim=keep), worst)

    return reduce


def _sum(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.sum(axes, keepdim=keep, dtype=x.dtype)


# Each with its function of a single number, for the case without axes, which keeps the shape.
KINDS: dict[str, tuple[Reduction, Callable[[Tensor], Tensor]]] = {
    "ReduceMean": (_mean, lambda x: x),
    "ReduceSum": (_sum, lambda x: x),
    "ReduceProd": (_product, lambda x: x),
    "ReduceMax": (_extreme(torch.amax, -1), lambda x: x),
    "ReduceMin": (_extreme(torch.amin, 1), lambda x: x),
    "ReduceL1": (lambda x, axes, keep: _sum(x.abs(), axes, keep), torch.abs),
    "ReduceL2": (lambda x, axes, keep: _sum(x * x, axes, keep).sqrt().to(x.dtype), torch.abs),
    "ReduceSumSquare": (lambda x, axes, keep: _sum(x * x, axes, keep), torch.square),
    "ReduceLogSum": (lambda x, axes, keep: _sum(x, axes, keep).log(), torch.log),
    "ReduceLogSumExp": (lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep), lambda x: x),
}


def _reduce(function: Reduction, single: Callable[[Tensor], Tensor]) -> Function:
    def reduced(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
        chosen = list(call.get("axes", [])) if axes is None else numbers(axes)
        if not chosen and (call.get("noop_with_empty_axes", 0) or not x.ndim):
            return single(x)
        return function(x, chosen or list(range(x.ndim)), bool(call.get("keepdims", 1)))

    return reduced


def _arg(function: Callable[..., Tensor]) -> Function:
    def found(call: Call, x: Tensor) -> Tensor:
        axis, keep = call.get("axis", 0), bool(call.get("keepdims", 1))
        if call.get("select_last_index", 0):
            return x.shape[axis] - 1 - function(x.flip(axis), dim=axis, keepdim=keep)
        return function(x, dim=axis, keepdim=keep)

    return found


def _running(step: Callable[..., Tensor]) -> Function:
    """Return a cumulative sum or product, with or without the element itself."""

    def running(call: Call, x: Tensor, axis: Tensor) -> Tensor:
        along, product = int(axis), step is torch.cumprod
        y = x.flip(along) if call.get("reverse", 0) else x
        if call.get("exclusive", 0):
            first = (torch.ones_like if product else torch.zeros_like)(y.narrow(along, 0, 1))
            y = torch.cat([first, y.narrow(along, 0, y.shape[along] - 1)], along)
        z = step(y, along).to(x.dtype)
        return z.flip(along) if call.get("reverse", 0) else z

    return running


def _top(call: Call, x: Tensor, k: Tensor | None = None) -> Any:
    count = int(k) if k is not None else int(call.get("k"))
    axis, largest = call.get("axis", -1), bool(call.get("largest", 1))
    order = torch.argsort(x, dim=axis, descending=largest, stable=True).narrow(axis, 0, count)
    return x.gather(axis, order), order


TABLE: dict[str, Function] = {
    **{name: _reduce(*pair) for name, pair in KINDS.items()},
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "CumSum": _running(torch.cumsum),
    "CumProd": _running(torch.cumprod),
    "TopK": _top,
}
