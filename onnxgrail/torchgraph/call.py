"""The description of a node for its operator's function, and conversions between ONNX values and torch tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import torch

from onnxgrail.core import Array
from onnxgrail.errors import UnsupportedOpError

Tensor: TypeAlias = torch.Tensor
Function = Callable[..., Any]  # (call, *inputs) -> a tensor, or a sequence of tensors for several outputs

TYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT64: torch.uint64,
    ir.DataType.UINT32: torch.uint32,
    ir.DataType.UINT16: torch.uint16,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.BOOL: torch.bool,
}
SMALL = {"int4": np.int8, "uint4": np.uint8, "int2": np.int8, "uint2": np.uint8}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """A node without its operands.

    Attributes:
        op, domain: the operator.
        version: the opset version of its domain in the graph.
        node: the name of its first output, for messages.
        outputs: number of its outputs.
        wanted: per output, True if it is used.
        attributes: plain Python values; tensors as tensors.
        floats: the dtype used for every floating-point type of the graph; None keeps the types.
    """

    op: str
    domain: str
    version: int
    node: str
    outputs: int
    wanted: tuple[bool, ...]
    attributes: Mapping[str, Any]
    floats: torch.dtype | None

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or the default if it is missing."""
        return self.attributes.get(name, default)

    def dtype(self, code: int) -> torch.dtype:
        """Return the torch dtype of an ONNX type number."""
        return kind(ir.DataType(code), self.floats, self)

    def unsupported(self, what: str) -> UnsupportedOpError:
        """Return the error for a variant of an operator that is not implemented."""
        return unsupported(self.domain, self.op, self.node, what)


def unsupported(domain: str, op: str, node: str, what: str = "") -> UnsupportedOpError:
    """Return the error for a node without gradient."""
    name = f"{domain}.{op}" if domain else op
    return UnsupportedOpError(
        f"no gradient through {name}{f' ({what})' if what else ''} at {node!r}",
        hint="Leave out --refine for this model; parts without such an op can still be refined one by one with laco",
        op=name,
    )


def kind(code: ir.DataType, floats: torch.dtype | None, call: Call | None = None) -> torch.dtype:
    """Return the torch dtype of an ONNX type; `floats` replaces all floating-point types."""
    found = TYPES.get(code)
    if found is None:
        where = call.node if call is not None else "a weight"
        raise unsupported(call.domain if call else "", call.op if call else "Constant", where, f"type {code.name}")
    return floats if floats is not None and found.is_floating_point else found


def as_tensor(array: Array, floats: torch.dtype | None = None) -> Tensor:
    """Return an array as a tensor that shares its memory if possible; callers never write into it."""
    array = np.asarray(array)
    if array.dtype.name in SMALL:  # torch has no integers of less than eight bits
        array = array.astype(SMALL[array.dtype.name])
    brain = array.dtype.name == "bfloat16"
    found = _shared(array.view(np.uint16)).view(torch.bfloat16) if brain else _shared(array)
    return found.to(floats) if floats is not None and found.is_floating_point() else found


def as_array(tensor: Tensor, like: np.dtype[Any]) -> Array:
    """Return a tensor as an array of a numpy dtype."""
    plain = tensor.detach().cpu()
    plain = plain.to(torch.float32) if plain.dtype == torch.bfloat16 else plain
    return np.asarray(plain.numpy()).astype(like)


def _shared(array: Array) -> Tensor:
    """Return a tensor without a copy if possible, and suppress torch's warning about read-only (mapped) arrays."""
    if any(step < 0 for step in array.strides) or not array.dtype.isnative:
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array) if array.ndim else torch.from_numpy(array.reshape(1)).reshape(())


def numbers(tensor: Tensor | None) -> list[Any]:
    """Return an operand as plain numbers: shapes, axes, pads."""
    return [] if tensor is None else tensor.flatten().tolist()


def filled(inputs: Sequence[Tensor | None], count: int) -> list[Any]:
    """Return `count` operands, with None for those missing at the end."""
    return [*inputs, *[None] * (count - len(inputs))]


def plain(function: Callable[..., Any]) -> Function:
    """Return the operator function of a torch function without attributes."""
    return lambda _, *inputs: function(*inputs)
