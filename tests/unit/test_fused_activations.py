"""Activations that ONNX Runtime fuses into layers become nodes of their own when a model is loaded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser

from onnxgrail.graph.io.model_file import load
from tests.oracle import run
from tests.tiny import feed, tiny

MS = "com.microsoft."
ROWS, MAPS = "float[5,8] x => float[] y", "float[2,3,6,6] x => float[] y"
GEMM, CONV = {"w": (6, 8), "g": (6,)}, {"w": (3, 3, 3, 3), "g": (3,)}
CASES: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "gemm": (
        ROWS,
        f'y = {MS}FusedGemm<activation="LeakyRelu", activation_alpha=0.3, transB=1, alpha=0.5>(x, w, g)',
        GEMM,
        ["Gemm", "LeakyRelu"],
    ),
    "hard": (
        ROWS,
        f'y = {MS}FusedGemm<activation="HardSigmoid", activation_alpha=0.3, activation_beta=0.1, transB=1>(x, w)',
        GEMM,
        ["Gemm", "HardSigmoid"],
    ),
    "conv": (MAPS, f'y = {MS}FusedConv<activation="Relu", pads=[1,1,1,1]>(x, w, g)', CONV, ["Conv", "Relu"]),
    "plain": (MAPS, f"y = {MS}FusedConv<pads=[1,1,1,1]>(x, w, g)", CONV, ["Conv"]),
    "clip": (
        MAPS,
        f'y = {MS}FusedConv<activation="Clip", activation_params=[0.0, 0.4], strides=[2,2]>(x, w)',
        CONV,
        ["Conv", "Constant", "Constant", "Clip"],
    ),
    "leaky": (
        MAPS,
        f'y = {MS}FusedConv<activation="LeakyRelu", activation_params=[0.2]>(x, w)',
        CONV,
        ["Conv", "LeakyRelu"],
    ),
    "summed": (
        MAPS,
        f'y = {MS}FusedConv<activation="Relu", pads=[1,1,1,1]>(x, w, g, x)',
        CONV,
        ["Conv", "Add", "Relu"],
    ),
}


def ops(model: ir.Model) -> list[str]:
    """Name the operators of all nodes, in the order of the graph."""
    return [node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph)]


@pytest.mark.parametrize("case", CASES)
def test_a_fused_layer_becomes_nodes_that_compute_the_same(case: str) -> None:
    signature, body, weights, expected = CASES[case]
    model = tiny(signature, body, weights, imports={"com.microsoft": 1})
    found = load(model)
    assert Counter(ops(found)) == Counter(expected)
    assert ops(found)[-1] == expected[-1]
    given = feed(model, batch=1)
    np.testing.assert_allclose(run(found, given)["y"], run(model, given)["y"], rtol=1e-5, atol=1e-6)


def test_limits_of_an_old_clip_are_attributes() -> None:
    text = f"""<ir_version: 7, opset_import: ["" : 10, "com.microsoft" : 1]>
    g (float[1,3,6,6] x, float[3,3,1,1] w) => (float[1,3,6,6] y)
    {{ y = {MS}FusedConv<activation="Clip", activation_params=[0.0, 0.4]>(x, w) }}"""
    conv, clip = load(parser.parse_model(text)).graph
    assert (conv.op_type, clip.op_type, len(clip.inputs)) == ("Conv", "Clip", 1)
    assert [round(clip.attributes[name].as_float(), 3) for name in ("min", "max")] == [0.0, 0.4]


def test_limits_have_the_type_of_the_weight() -> None:
    body = f'y = {MS}FusedConv<activation="Clip", activation_params=[0.0, 0.4]>(x, w)'
    weights = {"w": np.ones((3, 3, 1, 1), np.float16)}
    model = tiny("float16[2,3,6,6] x => float16[] y", body, weights, imports={"com.microsoft": 1})
    limits = [node.attributes["value"].as_tensor() for node in load(model).graph if node.op_type == "Constant"]
    assert [limit.dtype for limit in limits] == [ir.DataType.FLOAT16] * 2


def test_a_fused_layer_in_a_branch_is_separated_too() -> None:
    text = f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
    g (bool c, float[1,3,6,6] x, float[3,3,1,1] w) => (float[1,3,6,6] y)
    {{ y = If (c) <
        then_branch = a () => (float[1,3,6,6] p) {{ p = {MS}FusedConv<activation="Relu">(x, w) }},
        else_branch = b () => (float[1,3,6,6] q) {{ q = Identity(x) }}
    > }}"""
    model = parser.parse_model(text)
    found = load(model)
    assert {"Conv", "Relu"} < set(ops(found))
    assert "FusedConv" not in ops(found)
    onnx.checker.check_model(ir.to_proto(found))


def test_an_activation_of_another_name_stays_fused() -> None:
    body = f'y = {MS}FusedGemm<activation="ParametricSoftplus", transB=1>(x, w)'
    assert ops(load(tiny(ROWS, body, GEMM, imports={"com.microsoft": 1}))) == ["FusedGemm"]
