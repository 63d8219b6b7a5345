"""Predicted parameters and multiply-accumulates are those of the narrowed model itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper

from onnxgrail.calibration.observe import observe
from onnxgrail.graph.cost import counting
from onnxgrail.graph.trace.tracer import trace
from tests.oracle import killed, narrowed, survey_of
from tests.tiny import cnn, feed, ints, mlp, tiny

MODELS = {
    "mlp": mlp(2),
    "cnn": cnn(),
    "transposed": tiny(
        "float[N,3,4,4] x => float[] y",
        "a = Conv(x, w0, b0)\nb = Conv<group=8, pads=[1,1,1,1]>(a, w1)\nc = ConvTranspose(b, w2)\n"
        "d = Conv<group=2>(c, w3)\ne = GlobalAveragePool(d)\nf = Flatten(e)\ny = Gemm<transB=1>(f, w4, b4)",
        {
            "w0": (8, 3, 1, 1),
            "b0": (8,),
            "w1": (8, 1, 3, 3),
            "w2": (8, 6, 2, 2),
            "w3": (4, 3, 1, 1),
            "w4": (5, 4),
            "b4": (5,),
        },
    ),
    "recurrent": tiny(
        "float[N,5,6] x => float[] y",
        'a = MatMul(x, u)\nb, , c = LSTM<hidden_size=4, direction="bidirectional">(a, w, r)\n'
        "d = Transpose<perm=[0,2,1,3]>(b)\ne = Reshape(d, s)\nf = MatMul(e, v)\ng = GRU<hidden_size=5>(f, p, q)\n"
        "h = Squeeze(g, one)\ny = MatMul(h, end)",
        {
            "u": (6, 7),
            "w": (2, 16, 7),
            "r": (2, 16, 4),
            "s": ints(0, 0, -1),
            "v": (8, 6),
            "p": (1, 15, 6),
            "q": (1, 15, 5),
            "one": ints(1),
            "end": (5, 3),
        },
    ),
    "tied": tiny(
        "float[N,6] x => float[] y",
        "a = MatMul(x, u)\nb = Relu(a)\nc = MatMul(b, d)\ne = MatMul(c, u)\nf = Relu(e)\ny = MatMul(f, d)",
        {"u": (6, 8), "d": (8, 6)},
    ),
    "shared-bias": tiny(
        "float[N,6] x => float[] y",
        "a = MatMul(x, u)\nb = Add(a, s)\nc = MatMul(b, d)\ne = Add(c, s)\ny = MatMul(e, f)",
        {"u": (6, 8), "d": (8, 8), "s": (8,), "f": (8, 3)},
    ),
    "standardized": tiny(  # the new statistics beside a normalized weight are not read
        "float[N,1,4,4] x => float[] y",
        "v, m, s = BatchNormalization<training_mode=1>(w0, g0, z, z, z)\nw = Transpose<perm=[1,0,2,3]>(v)\n"
        "a = Conv(x, w)\nb = Relu(a)\ny = Conv(b, w1)",
        {"w0": (1, 8, 3, 3), "g0": (8,), "z": np.zeros(8, np.float32), "w1": (4, 8, 1, 1)},
    ),
    "heads": tiny(
        "float[N,5,8] x => float[] y",
        "q = MatMul(x, wq)\nr = Reshape(q, s)\nt = Transpose<perm=[0,2,1,3]>(r)\nu = Transpose<perm=[0,2,3,1]>(r)\n"
        "a = MatMul(t, u)\nb = Softmax(a)\nc = MatMul(b, t)\nd = Transpose<perm=[0,2,1,3]>(c)\ne = Reshape(d, m)\n"
        "y = MatMul(e, wo)",
        {"wq": (8, 12), "s": ints(0, 0, 4, 3), "m": ints(0, 0, 12), "wo": (12, 5)},
    ),
    "letters": tiny(
        "float[N,5,8] x => float[] y",
        'a = Einsum<equation="btd,df->btf">(x, w0)\nb = Relu(a)\nc = Einsum<equation="btf,fd->btd">(b, w1)\n'
        'q = Einsum<equation="btd,dhe->bthe">(c, w2)\ns = Einsum<equation="bqhe,bkhe->bhqk">(q, q)\np = Softmax(s)\n'
        'o = Einsum<equation="bhqk,bkhe->bqhe">(p, q)\nt = Transpose<perm=[0,1,3,2]>(o)\nm = Reshape(t, flat)\n'
        "y = MatMul(m, w3)",
        {"w0": (8, 12), "w1": (12, 8), "w2": (8, 4, 3), "flat": ints(0, 0, 12), "w3": (12, 5)},
    ),
}


def counted_macs(model: ir.Model) -> int:
    """By the definition of each op, from the shapes of a run."""
    shapes = observe(model, feed(model)).shapes
    total = 0
    for node in model.graph:
        names = [v.name or "" if v is not None else "" for v in node.inputs]
        out = node.outputs[0].name or ""
        if node.op_type == "Conv":
            total += math.prod(shapes[out]) * math.prod(shapes[names[1]][1:])
        elif node.op_type == "ConvTranspose":
            total += math.prod(shapes[names[0]]) * math.prod(shapes[names[1]][1:])
        elif node.op_type in {"LSTM", "GRU"}:
            steps, batch, _ = shapes[names[0]]
            total += steps * batch * sum(math.prod(shapes[name]) for name in names[1:3])
        elif node.op_type in {"MatMul", "Gemm", "Einsum"}:  # here, Einsum sums over the last axis of its first operand
            total += math.prod(shapes[out]) * shapes[names[0]][-1]
    return total


@pytest.mark.parametrize("ratio", [0.25, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_prediction_equals_the_narrowed_model(name: str, ratio: float) -> None:
    model = MODELS[name]
    survey = survey_of(model, feed(model))
    assert survey.blocks
    dead = killed(survey, ratio)
    slim = narrowed(model, survey, dead)
    assert counting.macs(model, survey) == counted_macs(model)
    assert counting.macs(model, survey, dead) == counted_macs(slim) < counted_macs(model)
    count, size = counting.removed(survey, dead)
    assert counting.parameters(model) - count == counting.parameters(slim)
    assert size == 4 * count
    assert counting.macs(slim, trace(slim, observe(slim, feed(slim)))) == counting.macs(model, survey, dead)


def test_shape_constants_are_no_parameters() -> None:
    model = MODELS["heads"]
    assert counting.parameters(model) == 8 * 12 + 12 * 5


def spelled(model: ir.Model) -> ir.Model:
    """The same model with all initializers in `Constant` nodes, and a number as exporters leave them there."""
    proto = ir.to_proto(model)
    held = [helper.make_node("Constant", [], [t.name], value=t) for t in proto.graph.initializer]
    number = helper.make_node("Constant", [], ["half"], value=helper.make_tensor("half", 1, [], [0.5]))
    nodes = [*held, number, *proto.graph.node]
    del proto.graph.node[:], proto.graph.initializer[:]
    proto.graph.node.extend(nodes)
    return ir.from_proto(proto)


@pytest.mark.parametrize("name", ["mlp", "cnn", "heads", "recurrent"])
def test_weights_in_nodes_are_parameters(name: str) -> None:
    stored, model = MODELS[name], spelled(MODELS[name])
    assert counting.parameters(model) == counting.parameters(stored) > 0
    survey = survey_of(model, feed(model))
    dead = killed(survey, 0.25)
    slim = narrowed(model, survey, dead)
    assert counting.parameters(model) - counting.removed(survey, dead)[0] == counting.parameters(slim)


def test_nothing_is_removed_when_nothing_is_dead() -> None:
    model = MODELS["cnn"]
    survey = survey_of(model, feed(model))
    dead = np.zeros(survey.ids, dtype=bool)
    assert counting.removed(survey, dead) == (0, 0)
    assert counting.macs(model, survey, dead) == counting.macs(model, survey)


def test_share_of_one_block() -> None:
    model = MODELS["mlp"]
    survey = survey_of(model, feed(model))
    shares = {b.kind: share for b, share in zip(survey.blocks, counting.block_shares(survey, model), strict=True)}
    assert shares["mlp"] == (6 * 8 + 8 + 8 * 6, 3 * 2 * 6 * 8)
    for block, share in zip(survey.blocks, counting.block_shares(survey, model), strict=True):
        dead = np.zeros(survey.ids, dtype=bool)
        dead[block.ids] = True
        assert share == (
            counting.removed(survey, dead)[0],
            counting.macs(model, survey) - counting.macs(model, survey, dead),
        )


def test_packed_and_filled_weights_count_whole() -> None:
    packed = tiny(
        "float[N,32] x => float[] y",
        "y = com.microsoft.MatMulNBits<K=32, N=5, bits=4, block_size=16>(x, b, s)",
        {"b": np.zeros((5, 2, 8), np.uint8), "s": (10,)},  # the scales do not count
        imports={"com.microsoft": 1},
        recorded=False,
    )
    assert counting.parameters(packed) == 32 * 5
    filled = tiny(
        "float[N,6] x => float[] y",
        "w = ConstantOfShape(s)\nm = ConstantOfShape(s)\na = MatMul(x, w)\ny = MatMul(a, u)",
        {"s": ints(6, 8), "u": (8, 3)},
    )
    assert counting.parameters(filled) == 6 * 8 + 8 * 3


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        ("q, s, z = DynamicQuantizeLinear(x)\na = MatMulInteger(q, b, z)\ny = Cast<to=1>(a)", {"b": (12, 5)}),
        (
            "q, s, z = DynamicQuantizeLinear(x)\na = QLinearMatMul(q, s, z, b, s, z, s, z)\ny = Cast<to=1>(a)",
            {"b": (12, 5)},
        ),
    ],
)
def test_products_of_integers_count(body: str, weights: dict[str, tuple[int, ...]]) -> None:
    stored = {name: np.ones(shape, np.uint8) for name, shape in weights.items()}
    model = tiny("float[N,12] x => float[] y", body, stored, recorded=False)
    once = {"x": np.ones((1, 12), np.float32)}
    assert counting.macs(model, trace(model, observe(model, once))) == 12 * 5


@pytest.mark.parametrize(
    ("body", "weights", "macs"),
    [
        ("y = com.microsoft.Attention<num_heads=2>(x, w, b)", {"w": (8, 24), "b": (24,)}, 5 * 8 * 24),
        ("y = com.microsoft.FusedMatMul<transA=1>(x, w)", {"w": (5, 7)}, 5 * 8 * 7),
        ("y = com.microsoft.FusedMatMul<transB=1>(x, w)", {"w": (7, 8)}, 5 * 8 * 7),
    ],
)
def test_fused_products_count(body: str, weights: dict[str, Any], macs: int) -> None:
    model = tiny("float[N,5,8] x => float[] y", body, weights, recorded=False, imports={"com.microsoft": 1})
    once = {"x": np.ones((1, 5, 8), np.float32)}
    assert counting.macs(model, trace(model, observe(model, once))) == macs


def test_convolutions_of_integers_count() -> None:
    model = tiny(
        "float[N,3,6,6] x => float[] y",
        "q, s, z = DynamicQuantizeLinear(x)\na = QLinearConv(q, s, z, w, s, z, s, z)\nb = DequantizeLinear(a, s, z)\n"
        "c, d, e = DynamicQuantizeLinear(b)\nf = ConvInteger(c, v, e)\ny = Cast<to=1>(f)",
        {"w": np.ones((4, 3, 3, 3), np.uint8), "v": np.ones((2, 4, 1, 1), np.uint8)},
        recorded=False,
    )
    once = {"x": np.ones((1, 3, 6, 6), np.float32)}
    assert counting.macs(model, trace(model, observe(model, once))) == 4 * 16 * 27 + 2 * 16 * 4
