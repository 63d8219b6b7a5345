"""Operators that read or write elements at indices."""

from __future__ import annotations

import torch

from onnxgrail.torchgraph.call import Call, Function, Tensor


def _counted(indices: Tensor, size: int) -> Tensor:
    """Convert negative indices, which count from the end, to positive ones."""
    whole = indices.long()
    return torch.where(whole < 0, whole + size, whole)


def _gather(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = call.get("axis", 0) % x.ndim
    place = _counted(indices, x.shape[axis])
    return x.index_select(axis, place.flatten()).reshape([*x.shape[:axis], *place.shape, *x.shape[axis + 1 :]])


def _gather_elements(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = call.get("axis", 0)
    return x.gather(axis, _counted(indices, x.shape[axis]))


def _gather_nd(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    batch, deep = call.get("batch_dims", 0), indices.shape[-1]
    whole = indices.ndim - 1
    own = tuple(
        torch.arange(x.shape[axis], device=x.device).reshape([-1 if a == axis else 1 for a in range(whole)])
        for axis in range(batch)
    )
    return x[own + tuple(_counted(indices[..., k], x.shape[batch + k]) for k in range(deep))]


REDUCED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scatter_nd(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    how, deep = call.get("reduction", "none"), indices.shape[-1]
    places = [_counted(indices[..., k], x.shape[k]) for k in range(deep)]
    if how in ("none", "add"):
        return x.index_put(tuple(places), updates, accumulate=how == "add")
    # One axis for the positions, another for the values written at each.
    flat, sizes = torch.zeros_like(places[0]), x.shape[:deep]
    for place, size in zip(places, sizes, strict=True):
        flat = flat * size + place
    rows = x.reshape(sizes.numel(), -1)
    into = flat.reshape(-1, 1).expand(flat.numel(), rows.shape[1])
    found = rows.scatter_reduce(0, into, updates.reshape(into.shape), REDUCED[how], include_self=True)
    return found.reshape(x.shape)


def _scatter_elements(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis, how = call.get("axis", 0), call.get("reduction", "none")
    place = _counted(indices, x.shape[axis])
    if how == "none":
        return x.scatter(axis, place, updates)
    return x.scatter_reduce(axis, place, updates, REDUCED[how], include_self=True)


def _compress(call: Call, x: Tensor, condition: Tensor) -> Tensor:
    axis = call.get("axis")
    x = x.flatten() if axis is None else x
    return x.index_select(axis or 0, torch.nonzero(condition).flatten())


TABLE: dict[str, Function] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
    "Scatter": _scatter_elements,
    "NonZero": lambda _, x: torch.nonzero(x).T,
    "Compress": _compress,
}
