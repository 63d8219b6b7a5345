"""Weights in half precision that a cast to float32 follows, as ONNX Runtime and converters write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.graph.rewrite.assign import in_its_place
from onnxgrail.graph.trace.facts import half_of
from tests.tiny import tiny

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(128, 24)).astype(np.float32)}


def model(*, turned: bool = False) -> ir.Model:
    """Two layers, the first with a bias in half precision, too; matrices may be transposed after the cast."""
    shapes = {"v": (24, 192), "b": (192,), "w": (192, 8)}
    weights = {name: (RNG.normal(size=shape) / 8).astype(np.float16) for name, shape in shapes.items()}
    body = "\n".join(f"{name}32 = Cast<to=1>({name})" for name in weights)
    if turned:
        weights = {name: np.ascontiguousarray(array.T) for name, array in weights.items()}
        body = "\n".join(f"{name}c = Cast<to=1>({name})\n{name}32 = Transpose({name}c)" for name in weights)
    return tiny(
        "float[N,24] x => float[] y",
        f"{body}\na = MatMul(x, v32)\nh = Add(a, b32)\nr = Relu(h)\ny = MatMul(r, w32)",
        weights,
    )


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("compensate", ["none", "grail", "best"])
def test_they_lose_units_and_stay_in_half_precision(compensate: Any, tmp_path: Path, *, turned: bool) -> None:
    ir.save(model(turned=turned), tmp_path / "m.onnx")
    choices: dict[str, Any] = {"data": DATA, "unit_ratio": 0.5, "compensate": compensate}
    entry = onnxgrail.compress(tmp_path / "m.onnx", tmp_path / "o.onnx", **choices).report.data["model"]
    assert entry["params_after"] - 96 * (24 + 1 + 8) == (8 if compensate == "best" else 0)  # best adds a shift
    assert (tmp_path / "o.onnx").stat().st_size < 0.7 * (tmp_path / "m.onnx").stat().st_size
    found = onnx.load(tmp_path / "o.onnx").graph
    halves = {tensor.name for tensor in found.initializer if tensor.data_type == onnx.TensorProto.FLOAT16}
    assert len(halves) == 3
    assert sum(node.op_type == "Cast" for node in found.node) == 3


def test_numbers_that_half_precision_cannot_hold_stay_in_float32() -> None:
    graph = model().graph
    value = next(node.outputs[0] for node in graph if node.op_type == "Cast")
    assert half_of(value) is graph.initializers["v"]
    small = in_its_place(graph, value, np.ones((24, 3), np.float32), "small")
    large = in_its_place(graph, value, np.full((24, 3), 1e6, np.float32), "large")
    assert half_of(small) is not None
    assert half_of(large) is None
    assert large.const_value is not None
    assert large.const_value.dtype == ir.DataType.FLOAT
