"""Elementwise arithmetic, comparison and activation operators."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as nn

from onnxgrail.torchgraph.call import Call, Function, Tensor, plain


def _chain(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """Return an operator of any number of operands."""
    return lambda _, *inputs: functools.reduce(function, inputs)


def _clip(call: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    bounds = [
        torch.as_tensor(call.get(name), dtype=x.dtype) if bound is None and name in call.attributes else bound
        for name, bound in (("min", low), ("max", high))
    ]
    return x if bounds == [None, None] else torch.clamp(x, *bounds)


def _is_inf(call: Call, x: Tensor) -> Tensor:
    found = torch.zeros_like(x, dtype=torch.bool)
    if call.get("detect_positive", 1):
        found = found | torch.isposinf(x)
    return found | torch.isneginf(x) if call.get("detect_negative", 1) else found


def _selu(call: Call, x: Tensor) -> Tensor:
    alpha, gamma = call.get("alpha", 1.67326319217681884765625), call.get("gamma", 1.05070102214813232421875)
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


def _shrink(call: Call, x: Tensor) -> Tensor:
    bias, edge = call.get("bias", 0.0), call.get("lambd", 0.5)
    return torch.where(x < -edge, x + bias, torch.where(x > edge, x - bias, torch.zeros_like(x))).to(x.dtype)


SHIFTS = {"LEFT": torch.bitwise_left_shift, "RIGHT": torch.bitwise_right_shift}
UNARY = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "HardSwish": nn.hardswish, "Identity": lambda x: x,
    "IsNaN": torch.isnan, "Log": torch.log, "Mish": nn.mish, "Neg": torch.neg, "Not": torch.logical_not,
    "BitwiseNot": torch.bitwise_not, "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round,
    "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh, "Softplus": nn.softplus,
    "Softsign": nn.softsign, "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
}  # fmt: skip
BINARY = {
    "Add": torch.add, "And": torch.logical_and, "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor, "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge,
    "Less": torch.lt, "LessOrEqual": torch.le, "Mul": torch.mul, "Or": torch.logical_or, "Sub": torch.sub,
    "Xor": torch.logical_xor,
}  # fmt: skip
TABLE: dict[str, Function] = {
    **{name: plain(function) for name, function in (UNARY | BINARY).items()},
    "Div": lambda _, x, y: x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc"),
    "Pow": lambda _, x, y: torch.pow(x, y.to(x.dtype) if x.is_floating_point() else y).to(x.dtype),
    "Mod": lambda call, x, y: (torch.fmod if call.get("fmod", 0) else torch.remainder)(x, y),
    "BitShift": lambda call, x, y: SHIFTS[call.get("direction")](x, y),
    "Min": _chain(torch.minimum),
    "Max": _chain(torch.maximum),
    "Sum": _chain(torch.add),
    "Mean": lambda _, *inputs: functools.reduce(torch.add, inputs) / len(inputs),
    "Clip": _clip,
    "Cast": lambda call, x: x.to(call.dtype(call.get("to"))),
    "CastLike": lambda _, x, y: x.to(y.dtype),
    "IsInf": _is_inf,
    "Where": plain(torch.where),
    "Gelu": lambda call, x: nn.gelu(x, approximate=call.get("approximate", "none")),
    "Swish": lambda call, x: x * torch.sigmoid(call.get("alpha", 1.0) * x),
    "LeakyRelu": lambda call, x: nn.leaky_relu(x, call.get("alpha", 0.01)),
    "Elu": lambda call, x: torch.where(x > 0, x, call.get("alpha", 1.0) * torch.expm1(x.clamp(max=0))),
    "Celu": lambda call, x: nn.celu(x, call.get("alpha", 1.0)),
    "Selu": _selu,
    "HardSigmoid": lambda call, x: (call.get("alpha", 0.2) * x + call.get("beta", 0.5)).clamp(0, 1),
    "ThresholdedRelu": lambda call, x: torch.where(x > call.get("alpha", 1.0), x, torch.zeros_like(x)),
    "Shrink": _shrink,
    "PRelu": lambda _, x, slope: torch.where(x < 0, x * slope, x),
}
