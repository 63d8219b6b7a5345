"""Cases of the rules in `ops/pointwise.py`."""

from __future__ import annotations

import numpy as np

from tests.contract.rule_case import Case
from tests.tiny import ints, scalar

GIVEN = "combined with x2, an input of the model, whose size stays"

PLAIN = (
    "Relu", "LeakyRelu", "Sigmoid", "Tanh", "Erf", "Gelu", "Softplus", "Softsign", "HardSwish", "HardSigmoid", "Abs",
    "Neg", "Exp", "Identity", "Elu", "Selu", "Celu", "Mish", "Sin", "Cos", "Sign", "Atan", "Sinh", "Cosh",
    "Asinh",
)  # fmt: skip

UNARY = [
    *(Case(op=op, body=f"z = {op}(h)") for op in PLAIN),
    *(Case(op=op, body=f"p = Exp(h)\nz = {op}(p)") for op in ("Log", "Sqrt", "Reciprocal")),
    *(
        Case(op=op, body=f"p = Mul(h, three)\nz = {op}(p)", weights={"three": scalar(3)})
        for op in ("Floor", "Ceil", "Round")
    ),
    *(
        Case(op=op, body=f"p = Tanh(h)\nq = Mul(p, half)\nz = {op}(q)", weights={"half": scalar(0.9)})
        for op in ("Asin", "Acos", "Atanh", "Tan")
    ),
    Case(op="Acosh", body="p = Exp(h)\nq = Add(p, one)\nz = Acosh(q)", weights={"one": scalar(1)}),
    Case(op="Swish", body="z = Swish(h)", opset=24),
    Case(op="Gelu", body='z = Gelu<approximate="tanh">(h)', note="tanh"),
    Case(op="Shrink", body="z = Shrink<lambd=0.3>(h)"),
    Case(op="ThresholdedRelu", body="z = ThresholdedRelu<alpha=0.1>(h)"),
    Case(op="Affine", body="z = Affine<alpha=2.0, beta=0.5>(h)", opset=7),
    Case(op="ScaledTanh", body="z = ScaledTanh<alpha=2.0, beta=0.5>(h)", opset=7),
    Case(op="ParametricSoftplus", body="z = ParametricSoftplus<alpha=2.0, beta=0.5>(h)", opset=7),
    Case(op="Clip", body="z = Clip(h, low, high)", weights={"low": scalar(-0.5), "high": scalar(0.7)}),
    Case(op="Clip", body="z = Clip(h, , high)", weights={"high": scalar(0.3)}, note="absent-minimum"),
    Case(op="Clip", body="z = Clip<min=-0.5, max=0.5>(h)", opset=9, note="attributes"),
    Case(op="Cast", body="p = Cast<to=10>(h)\nz = Cast<to=1>(p)"),
    Case(op="CastLike", body="z = CastLike(h, one)", weights={"one": scalar(1)}),
    Case(op="Dropout", body="z, m = Dropout(h)"),
    Case(op="Dropout", body="d, m = Dropout(h)\nf = Cast<to=1>(m)\nz = Mul(d, f)", note="mask-read"),
    Case(op="Not", body="b = Greater(h, zero)\nn = Not(b)\nz = Cast<to=1>(n)", weights={"zero": scalar(0)}),
    Case(op="IsNaN", body="r = Sqrt(h)\nn = IsNaN(r)\nz = Where(n, zero, r)", weights={"zero": scalar(0)}),
    Case(op="IsInf", body="p = Relu(h)\nr = Reciprocal(p)\nn = IsInf(r)\nz = Cast<to=1>(n)"),
    Case(
        op="BitwiseNot",
        body="p = Mul(h, nine)\nc = Cast<to=6>(p)\nn = BitwiseNot(c)\nz = Cast<to=1>(n)",
        weights={"nine": scalar(9)},
    ),
    Case(op="QuickGelu", domain="com.microsoft", body="z = com.microsoft.QuickGelu<alpha=1.702>(h)"),
]

BINARY = [
    *(Case(op=op, body=f"z = {op}(h, g)", note="tied") for op in ("Add", "Sub", "Mul", "Max", "Min", "Sum", "Mean")),
    *(
        Case(op=op, body=f"z = {op}(c, h)", weights={"c": (8,)}, note="constant")
        for op in ("Add", "Sub", "Mul", "Max", "Min", "Sum", "Mean")
    ),
    *(
        Case(op=op, body=f"b = {op}(h, g)\nf = Cast<to=1>(b)\nz = Mul(f, h)", note="tied")
        for op in ("Greater", "Less", "GreaterOrEqual", "LessOrEqual")
    ),
    *(
        Case(op=op, body=f"b = {op}(h, c)\nz = Cast<to=1>(b)", weights={"c": (1, 8)}, note="constant")
        for op in ("Greater", "Less", "GreaterOrEqual", "LessOrEqual")
    ),
    *(
        Case(
            op=op,
            body=f"a = Greater(h, zero)\nb = Greater(g, zero)\nc = {op}(a, b)\nz = Cast<to=1>(c)",
            weights={"zero": scalar(0)},
        )
        for op in ("And", "Or", "Xor")
    ),
    *(
        Case(
            op=op,
            body="a = Mul(h, nine)\nb = Mul(g, nine)\nc = Cast<to=6>(a)\nd = Cast<to=6>(b)\n"
            f"e = {op}(c, d)\nz = Cast<to=1>(e)",
            weights={"nine": scalar(9)},
        )
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
    ),
    Case(
        op="BitShift",
        body="a = Mul(h, nine)\nb = Abs(a)\nc = Cast<to=12>(b)\n"
        'd = BitShift<direction="LEFT">(c, k)\nz = Cast<to=1>(d)',
        weights={"nine": scalar(9), "k": np.arange(8, dtype=np.uint32)},
    ),
    Case(op="Div", body="p = Exp(g)\nz = Div(h, p)", note="tied"),
    Case(op="Div", body="z = Div(h, c)", weights={"c": np.linspace(1, 2, 8, dtype=np.float32)}, note="constant"),
    Case(op="Pow", body="p = Exp(h)\nz = Pow(p, c)", weights={"c": (8,)}),
    Case(op="Mod", body="p = Exp(h)\nz = Mod<fmod=1>(p, c)", weights={"c": np.linspace(1, 2, 8, dtype=np.float32)}),
    Case(op="Equal", body="a = Round(h)\nb = Round(g)\nc = Equal(a, b)\nz = Cast<to=1>(c)"),
    Case(op="PRelu", body="z = PRelu(h, c)", weights={"c": (8, 1, 1)}, frame="maps"),
    Case(op="PRelu", body="z = PRelu(h, c)", weights={"c": (1,)}, note="shared-slope"),
    Case(op="Where", body="b = Greater(h, g)\nz = Where(b, h, g)", note="tied"),
    Case(
        op="Where",
        body="b = Greater(h, zero)\nz = Where(b, h, c)",
        weights={"zero": scalar(0), "c": (1, 8)},
        note="constant",
    ),
    Case(
        op="Where",
        body="z = Where(c, h, g)",
        note="constant-condition",
        weights={"c": np.array([0, 1, 1, 0, 1, 1, 1, 0], bool)},
    ),
    Case(op="Sum", body="z = Sum(h, g, c)", weights={"c": (8,)}, note="three"),
    Case(op="Sum", body="z = Sum(h)", note="one"),
    Case(op="Add", body="z = Add(h, c)", weights={"c": scalar(0.5)}, note="scalar"),
    Case(op="Add", body="z = Add(h, c)", weights={"c": (1, 8, 1, 1)}, frame="maps", note="map-bias"),
    Case(op="Add", body="z = Add(h, c)", weights={"c": (8, 4, 4)}, frame="maps", note="whole-map"),
    Case(op="Add", body="z = Add(h, c)", weights={"c": (5, 1)}, frame="tokens", note="per-token"),
    Case(op="Add", body="z = Add(h, x2)", inputs="float[N,8] x2", refused=GIVEN, units=(), note="input"),
    Case(
        op="Mul",
        body="s = Slice(x2, start, end, two)\nt = Squeeze(s, two)\nz = Mul(h, t)",
        weights={"start": ints(0), "end": ints(1), "two": ints(2)},
        inputs="float[N,8,2] x2",
        refused=GIVEN,
        units=(),
        note="part-of-an-input",
    ),
    Case(op="Add", body="z = Add(h, x2)", inputs="float[N,1] x2", note="narrow-input"),
    Case(op="Mul", body="z = Mul(h, h)", note="square"),
    Case(op="Mul", body="s = Sigmoid(h)\nz = Mul(s, h)", note="silu"),
    Case(op="Mul", body="p = GlobalAveragePool(h)\nq = Sigmoid(p)\nz = Mul(h, q)", frame="maps", note="gate"),
    Case(op="Mul", body="z = Mul(h, c)", weights={"c": (5, 8)}, frame="tokens", note="per-token-and-channel"),
    Case(
        op="Add",
        body="p = ReduceMean<keepdims=0>(g, one)\nq = Unsqueeze(p, one)\nz = Add(h, q)",
        weights={"one": ints(1)},
        frame="tokens",
        note="broadcast-tokens",
    ),
]

CASES = [*UNARY, *BINARY]
