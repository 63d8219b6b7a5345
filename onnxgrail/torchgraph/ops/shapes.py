"""Constants, shapes, and tensors generated from them."""

from __future__ import annotations

from typing import Any

import torch

from onnxgrail.torchgraph.call import Call, Function, Tensor, numbers


def _constant(call: Call) -> Tensor:
    if "value" in call.attributes:
        found: Tensor = call.get("value")
        return found
    floats = call.floats or torch.float32
    kinds = {"value_float": floats, "value_floats": floats, "value_int": torch.int64, "value_ints": torch.int64}
    for name, dtype in kinds.items():
        if name in call.attributes:
            return torch.tensor(call.get(name), dtype=dtype)
    raise call.unsupported(f"attributes {', '.join(call.attributes)}")


def _filled(call: Call, shape: Tensor) -> Tensor:
    value = call.get("value")
    if value is None:
        return torch.zeros(numbers(shape), dtype=call.floats or torch.float32)
    return value.reshape(()).expand(numbers(shape)).clone()


def _eye(call: Call, x: Tensor) -> Tensor:
    code, k = call.get("dtype"), call.get("k", 0)
    dtype = x.dtype if code is None else call.dtype(code)
    rows, columns = (torch.arange(n) for n in x.shape)
    return (columns[None, :] - rows[:, None] == k).to(dtype)


def _one_hot(call: Call, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    count, axis = int(depth), call.get("axis", -1)
    places = torch.arange(count)
    hot = (torch.where(indices < 0, indices + count, indices).long()[..., None] == places).movedim(-1, axis)
    return torch.where(hot, values[1], values[0])


def _window(kind: Any) -> Function:
    def window(call: Call, size: Tensor) -> Tensor:
        code = call.get("output_datatype", 1)
        return kind(int(size), periodic=bool(call.get("periodic", 1)), dtype=torch.float64).to(call.dtype(code))

    return window


TABLE: dict[str, Function] = {
    "Constant": _constant,
    "ConstantOfShape": _filled,
    "Shape": lambda call, x: torch.tensor(x.shape[call.get("start", 0) : call.get("end")], dtype=torch.int64),
    "Size": lambda _, x: torch.tensor(x.numel(), dtype=torch.int64),
    "Range": lambda _, start, *to: torch.arange(start.item(), *(t.item() for t in to), dtype=start.dtype),
    "EyeLike": _eye,
    "OneHot": _one_hot,
    "HannWindow": _window(torch.hann_window),
}
