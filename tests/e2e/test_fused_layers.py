"""Weights of operators that ONNX Runtime fuses, and of convolutions in half precision, get fewer bits, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from tests.tiny import tiny

RNG = np.random.default_rng(0)
GEMM = "com.microsoft.FusedGemm"
IMPORTS = {"com.microsoft": 1}
MODELS = {
    "FusedConv": (
        "float[N,8,6,6] x => float[] y",
        'a = com.microsoft.FusedConv<activation = "Relu">(x, w0, b)\ny = com.microsoft.FusedConv(a, w1)',
        {"w0": (64, 8, 3, 3), "b": (64,), "w1": (64, 64, 3, 3)},
    ),
    "FusedGemm": (
        "float[N,64] x => float[] y",
        f'a = {GEMM}<activation = "Relu", transB = 1>(x, w0, b)\ny = {GEMM}<activation = "Sigmoid">(a, w1, c)',
        {"w0": (256, 64), "b": (256,), "w1": (256, 64), "c": (64,)},
    ),
    "Attention": (
        "float[N,5,64] x => float[] y",
        "y = com.microsoft.Attention<num_heads = 4>(x, w, b)",
        {"w": (64, 192), "b": (192,)},
    ),
    "EmbedLayerNormalization": (
        "int32[N,5] x => float[] y",
        "y, m = com.microsoft.EmbedLayerNormalization(x, , t, p, , g, b)",
        {"t": (300, 64), "p": (8, 64), "g": np.ones(64, np.float32), "b": (64,)},
    ),
    "half precision": (
        "float16[N,8,6,6] x => float16[] y",
        "a = Conv(x, w0)\nr = Relu(a)\ny = Conv(r, w1)",
        {"w0": (64, 8, 3, 3), "w1": (64, 64, 3, 3)},
    ),
}
SHARES = {"half precision": "65%"}
CHOICES: list[dict[str, Any]] = [{"target_size": "35%"}, {"ratio": 0, "quantize": "int8-weights"}]


def model_of(name: str) -> ir.Model:
    """A model whose weights are of one kind; those in half precision are small, so that scales would vanish in it."""
    signature, body, weights = MODELS[name]
    if name == "half precision":
        weights = {n: (RNG.normal(size=s) * 1e-4).astype(np.float16) for n, s in weights.items()}
    return tiny(signature, body, weights, imports=IMPORTS)


def data_of(model: ir.Model) -> dict[str, Any]:
    """Inputs of 16 samples."""
    (given,) = model.graph.inputs
    assert given.shape is not None
    shape = (
        (16, *given.shape.numpy()[1:]) if given.shape.is_static() else (16, *[int(n) for n in list(given.shape)[1:]])
    )
    if given.dtype == ir.DataType.INT32:
        return {"x": RNG.integers(0, 300, shape).astype(np.int32)}
    return {"x": RNG.normal(size=shape).astype(given.dtype.numpy())}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("choices", CHOICES, ids=["size", "weights"])
def test_they_have_8_bits_where_the_size_counts(name: str, choices: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(name)
    ir.save(model, tmp_path / "a.onnx")
    data, before = data_of(model), (tmp_path / "a.onnx").stat().st_size
    if "target_size" in choices:
        choices = {"target_size": SHARES.get(name, choices["target_size"]), "only_bits": True}
    onnxgrail.compress(tmp_path / "a.onnx", tmp_path / "b.onnx", data=data, **choices)
    assert (tmp_path / "b.onnx").stat().st_size < before * (0.65 if name in SHARES else 0.4)
    (output,) = onnxgrail.compare(tmp_path / "a.onnx", tmp_path / "b.onnx", data=data).outputs
    assert output.nmse < 1e-3


def test_bits_in_half_precision_are_raised_again_where_they_fit(tmp_path: Path) -> None:
    model = model_of("half precision")
    ir.save(model, tmp_path / "a.onnx")
    choices = {"target_size": "97%", "only_bits": True}
    result = onnxgrail.compress(tmp_path / "a.onnx", tmp_path / "b.onnx", data=data_of(model), **choices)
    assert sorted(result.report.data["allocation"]["bits"].values()) == [8, 32]
