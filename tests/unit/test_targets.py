"""Findings of `--target tensorrt` in small graphs."""

from __future__ import annotations

import datetime as dt

import onnx
import onnx_ir as ir
import pytest

from onnxgrail.finishing import targets
from onnxgrail.recipe.table import FIELDS

HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\ng '

ROUNDED = """(float[2,8] x) => (float[2,8] y) <float s = {0.1}, uint8 z = {3}>
    { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }"""
TWO_OUTPUTS = """(float[1,2,4,4] x) => (float[1,2,4,4] y, int64[1,2,4,4] i)
    { y, i = MaxPool<kernel_shape = [1, 1]>(x) j = Identity(i) }"""


BRANCHES = """(bool b, float[2] x) => (float[2] y) {
    y = If(b) <then_branch = a () => (float[2] t) { q = Cast<to = 12>(x) t = Cast<to = 1>(q) },
               else_branch = c () => (float[2] e) { e = Relu(x) }>
}"""


def found(text: str, opset: int = 18) -> list[tuple[str, str, str]]:
    model = ir.from_proto(onnx.parser.parse_model(HEAD.format(opset=opset) + text))
    entry = targets.check(model, "tensorrt")
    assert entry["passed"] == all(one["level"] != "problem" for one in entry["findings"])
    return [(one["level"], one["op"], one["reason"]) for one in entry["findings"]]


def test_a_plain_model_passes() -> None:
    assert found("(float[2,8] x) => (float[2,8] y) { y = Relu(x) }") == []


@pytest.mark.parametrize(
    ("text", "level", "op", "words"),
    [
        ("(float[2,8] x) => (float[2,8] y) { y = Bernoulli(x) }", "problem", "Bernoulli", "does not support"),
        ("(float[2,8] x) => (float[2,8] y) { y = NewOp(x) }", "problem", "NewOp", "does not support"),
        ("(float[2,8] x) => (float[2,8] y) { y = com.microsoft.FastGelu(x) }", "problem", "FastGelu", "com.microsoft"),
        ("(float[2,8] x, int64[1] a) => (float[2,1] y) { y = ReduceSum(x, a) }", "problem", "ReduceSum", "constant"),
        ("(int16[2] x) => (int16[2] y) { y = Abs(x) }", "problem", "", "type INT16"),
        ("(double[2] x) => (double[2] y) { y = Abs(x) }", "advice", "", "smaller type"),
        ("(float[2] x) => (int16[2] y) { y = Cast<to = 5>(x) }", "problem", "Cast", "INT16"),
        (
            "(float[1] x) => (float[1] y) { c = Constant<value = uint16[1] {1}>() d = Cast<to = 1>(c) y = Mul(x, d) }",
            "problem",
            "",
            "c has the type UINT16",
        ),
        (
            "(float[1] x) => (float[1] y) { c = Constant<value = double[1] {1}>() d = Cast<to = 1>(c) y = Mul(x, d) }",
            "advice",
            "",
            "c is DOUBLE",
        ),
        (
            BRANCHES,
            "problem",
            "Cast",
            "casts to UINT32",
        ),
        (
            "(float[2] x) => (float[2] y) <uint64[2] m> { m = Abs(x) y = Abs(m) }",
            "problem",
            "",
            "m has the type UINT64",
        ),
        (
            "(float[N,C,8,8] x, float[4,3,3,3] w) => (float[N,4,6,6] y) { y = Conv(x, w) }",
            "problem",
            "Conv",
            "channels of its input x must have a fixed size",
        ),
        ("(float[N,8] x) => (float[N,8] y) { y = Relu(x) }", "advice", "", "[N, 8] has open sizes"),
        (
            ROUNDED,
            "problem",
            "QuantizeLinear",
            "zero point must be zero",
        ),
        (
            TWO_OUTPUTS,
            "problem",
            "MaxPool",
            "first 1 outputs",
        ),
        (
            "(float[1,2,4,4] x) => (float[1,2,2,2] y) { y = MaxPool<kernel_shape = [2, 2], dilations = [2, 2]>(x) }",
            "problem",
            "MaxPool",
            "dilations must be 1",
        ),
    ],
)
def test_findings(text: str, level: str, op: str, words: str) -> None:
    rows = found(text)
    assert any((row[0], row[1]) == (level, op) and words in row[2] for row in rows), rows


def test_open_batches_and_sizes_of_maps_are_no_problem() -> None:
    rows = found("(float[N,3,H,W] x, float[4,3,3,3] w) => (float[N,4,h,v] y) { y = Conv(x, w) }")
    assert [row[0] for row in rows] == ["advice"]


def test_constants_are_seen_wherever_they_stand() -> None:
    for text in (
        "(float[2,8] x) => (float[2,1] y) <int64[1] a = {1}> { y = ReduceSum(x, a) }",
        "(float[2,8] x) => (float[2,1] y) { a = Constant<value_ints = [1]>() y = ReduceSum(x, a) }",
        "(float[2,8] x) => (float[2,1] y) { a = Constant<value = int64[1] {1}>() y = ReduceSum(x, a) }",
    ):
        assert found(text) == []


def test_opsets_beyond_the_table() -> None:
    assert "opset 21 is outside 9 to 20" in found("(float[2,8] x) => (float[2,8] y) { y = Relu(x) }", opset=21)[0][2]


@pytest.mark.parametrize(("width", "odd"), [(16, False), (12, True), (3, False)])
def test_channels_fill_the_cores(width: int, odd: bool) -> None:
    text = f"(float[2,16] x) => (float[2,{width}] y) {{ y = MatMul(x, w) }}"
    model = ir.from_proto(onnx.parser.parse_model(HEAD.format(opset=18) + text))
    value = ir.Value(name="w", const_value=ir.tensor([[0.0] * width] * 16, dtype=ir.DataType.FLOAT, name="w"))
    old = next(node for node in model.graph).inputs[1]
    next(node for node in model.graph).replace_input_with(1, value)
    model.graph.initializers["w"] = value
    assert old is not None
    rows = targets.check(model, "tensorrt")["findings"]
    assert [("multiple of 8" in row["reason"], f"({width})" in row["reason"]) for row in rows] == [(True, True)] * odd


def test_subgraphs_are_looked_into() -> None:
    text = """(bool c, float[2] x) => (float[2] y) {
        y = If(c) <then_branch = a () => (float[2] t) { t = Bernoulli(x) },
                   else_branch = b () => (float[2] e) { e = Relu(x) }>
    }"""
    assert [row[1] for row in found(text)] == ["Bernoulli"]


def test_the_table_says_where_it_is_from() -> None:
    for name in FIELDS["target"].value.words:
        known = targets.table(name)
        assert known["source"].startswith("https://")
        assert dt.date.fromisoformat(known["date"])
        supported, unsupported = (set(known["operators"][key]) for key in ("supported", "unsupported"))
        assert not supported & unsupported
        named = {*known["constants"], *known["zeros"], *known["outputs"], *known["attributes"]}
        assert named <= supported
        every = {schema.name for schema in onnx.defs.get_all_schemas()}
        assert len(unsupported - every) < 3  # spelled as ONNX does
