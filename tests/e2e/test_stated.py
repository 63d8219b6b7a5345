"""Statements of a model beside nodes and weights stay, also where a tool rewrites it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from tests.tiny import tiny

CHOICES: dict[str, dict[str, Any]] = {
    "narrowed": {},
    "QDQ": {"quantize": "int8", "qdq": True},
    "TensorRT": {"quantize": "int8", "target": "tensorrt"},
    "dynamic": {"quantize": "int8-dynamic"},
    "half": {"quantize": "fp16"},
    "four bits": {"quantize": "int4", "block_size": 16},
}


def stating(opset: int) -> onnx.ModelProto:
    body = (
        "a = Conv<pads=[2,2], strides=[2]>(x, w)\nb = Relu(a)\nc = Conv<pads=[1,1]>(b, v)\nd = Relu(c)\n"
        "e = Conv(d, u)\ny = Identity(e)"
    )
    weights = {"w": (64, 4, 5), "v": (64, 64, 3), "u": (2, 64, 1)}
    model = ir.to_proto(tiny("float[N,4,32] x => float[N,2,L] y", body, weights, opset=opset, recorded=False))
    model.producer_name, model.doc_string, model.model_version, model.domain = "mine", "of a sensor", 7, "org.mine"
    model.graph.input[0].doc_string, model.graph.output[0].doc_string = "volts", "amperes"
    return model


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("name", CHOICES)
def test_the_interface_and_the_maker_stay(name: str, opset: int) -> None:
    data = {"x": np.random.default_rng(0).normal(size=(48, 4, 32)).astype(np.float32)}
    model = stating(opset)
    result = onnxgrail.compress(model, data=data, unit_ratio=0.5, compensate="grail", minimize="size", **CHOICES[name])
    made = result.proto()
    for old, new in zip(
        (*model.graph.input, *model.graph.output), (*made.graph.input, *made.graph.output), strict=True
    ):
        assert old == new
    told = [(one.producer_name, one.doc_string, one.model_version, one.domain) for one in (model, made)]
    assert told[0] == told[1]
    assert {one.domain for one in made.opset_import} == {""} | {node.domain for node in made.graph.node}
    found = result.report.data["quantization"]
    if found is not None:
        assert found["bytes_after"] == result.report.data["model"]["bytes_after"] == len(result.to_bytes())
