"""Quantised graphs beyond single rules: what is shared stays shared, and fused kernels go on computing the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrail
from onnxgrail.core import Array
from onnxgrail.graph.fittable.consumers import consumers
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.rewrite.decisions import apply
from onnxgrail.graph.trace.survey import Ledger
from onnxgrail.narrowing.bits.again import ROUNDED
from tests.contract.cases_quantised import PACKED, WEIGHTS, codes, scales
from tests.contract.rule_case import Case, build
from tests.oracle import killed, narrowed, narrowed_equals_masked, run, survey_of
from tests.tiny import feed, lines, scalar, tiny


def named(note: str) -> Case:
    return next(c for c in [*WEIGHTS, *PACKED] if c.note == note)


def halved(model: ir.Model) -> ir.Model:
    survey = survey_of(model, feed(model))
    return narrowed(model, survey, killed(survey, 0.5))


def test_one_weight_is_kept_once() -> None:
    slim = halved(build(named("one-weight-dequantised-twice")))
    first, second = (n for n in slim.graph if n.op_type == "DequantizeLinear")
    assert first.inputs[0] is second.inputs[0]
    assert first.inputs[1] is second.inputs[1]
    assert slim.graph.initializers["q"].const_value.shape == (4, 3)


def test_integers_of_two_weights_are_cut_apart() -> None:
    slim = halved(build(named("two-weights-of-the-same-integers")))
    first, second = (n.inputs[0].const_value.numpy() for n in slim.graph if n.op_type == "DequantizeLinear")
    assert first.shape == second.shape == (4, 3)
    assert not np.array_equal(first, second)


def test_a_scale_of_one_number_is_not_copied() -> None:
    body = "v = DequantizeLinear(q, s)\nu = DequantizeLinear(r, s)\na = MatMul(x, v)\ny = MatMul(a, u)"
    model = tiny("float[N,5] x => float[] y", body, {"q": codes((5, 8)), "r": codes((8, 4)), "s": np.float32([0.1])})
    assert set(halved(model).graph.initializers) == {"q", "r", "s"}


def test_a_transposed_weight_stays_an_integer() -> None:
    slim = halved(build(named("transposed")))
    q = slim.graph.initializers["q"].const_value
    assert (q.dtype, q.shape) == (ir.DataType.INT8, (3, 4))
    assert [n.op_type for n in slim.graph][1:4] == ["DequantizeLinear", "Transpose", "MatMul"]


def test_one_dequantised_weight_read_straight_and_transposed_is_left_alone() -> None:
    body = "v = DequantizeLinear(q, s)\nt = Transpose(v)\na = MatMul(x, v)\ny = MatMul(a, t)"
    model = tiny("float[N,5] x => float[] y", body, {"q": codes((5, 8)), "s": scalar(0.1)})
    survey = narrowed_equals_masked(model, feed(model))
    assert not survey.blocks
    assert any("also read by Transpose" in r.reason for r in survey.refusals)


def test_integers_in_a_constant_node_are_cut() -> None:
    body = "v = DequantizeLinear(q, s)\na = MatMul(x, v)\ny = MatMul(a, w)"
    weights = {"q": codes((2, 4), "int4"), "s": scalar(0.3), "w": (4, 3)}
    model = tiny("float[N,2] x => float[] y", body, weights, opset=21)
    held = model.graph.initializers.pop("q")
    node = ir.Node("", "Constant", [], [ir.AttrTensor("value", held.const_value)], name="q")
    node.outputs[0].name = "q"
    held.replace_all_uses_with(node.outputs[0])
    model.graph.insert_before(model.graph[0], node)
    assert [b.units for b in narrowed_equals_masked(model, feed(model)).blocks] == [4]


FAKE = "q = QuantizeLinear(w, s)\nv = DequantizeLinear(q, s)\na = MatMul(x, u)\nh = Relu(a)\ny = MatMul(h, v)"


@pytest.mark.parametrize(("more", "name"), [("", "w"), ("\nz = Identity(w)", "v"), ("\nz = Identity(q)", "v")])
def test_the_report_names_the_float_array_that_the_graph_rounds(more: str, name: str) -> None:
    """If nothing else reads it, so that the file alone tells what is gone, whatever operators round it."""
    kind = "uint8" if "q)" in more else "float"
    signature = "float[N,6] x => float[N,4] y" + (f", {kind}[16,4] z" if more else "")
    model = tiny(signature, FAKE + more, {"u": (6, 16), "w": (16, 4), "s": scalar(0.01)})
    data = {"x": np.random.default_rng(0).standard_normal((32, 6)).astype(np.float32)}
    found = onnxgrail.compress(to_bytes(model), data=data, unit_ratio=0.5, compensate="none", round_to=1)
    (block,) = found.report.data["blocks"]
    assert [(m["initializer"], m["role"]) for m in block["members"]] == [("u", "producer"), (name, "consumer")]


def test_reordered_blocks_are_refused_with_a_reason() -> None:
    survey = narrowed_equals_masked(model := build(named("reordered")), feed(model))
    (stuck,) = [r for r in survey.refusals if r.value == "u"]
    assert (stuck.op, stuck.reason.split(",")[0]) == ("MatMulNBits", "its weight is reordered")


def test_blocks_with_another_scale_elsewhere_are_refused() -> None:
    model = build(named("4-bits"))
    (node,) = (n for n in model.graph if n.op_type == "MatMulNBits")
    scale = ir.Value(name="s2", const_value=ir.tensor(scales(6, 3, seed=9), name="s2"))
    model.graph.register_initializer(scale)
    inputs = [*node.inputs[:2], scale]
    other = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), name="other")
    other.outputs[0].name = "also"
    model.graph.insert_after(node, other)
    model.graph.outputs.append(other.outputs[0])
    survey = survey_of(model, feed(model))
    assert any(r.value == "u" and r.op == "MatMulNBits" for r in survey.refusals)


@pytest.mark.parametrize("note", ["4-bits-zeros", "8-bits", "fractions"])
def test_packed_weights_pass_the_proof(note: str) -> None:
    model = build(named(note))
    x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    result = onnxgrail.compress(model, data={"x": x}, unit_ratio=0.5, round_to=1)
    kept = {b["name"]: (b["units"], b["kept"]) for b in result.report.data["blocks"]}
    assert sorted(kept.values()) == [(2, 1), (6, 3), (7, 3), (8, 4)]


# ---- integer kernels
CHAIN = """
    k = $first(x, w)
    a = QuantizeLinear(k, sx, px)
    b = DequantizeLinear(a, sx, px)
    v = DequantizeLinear<axis=0>(q, sw)
    c = DequantizeLinear<axis=0>(qb, sb)
    d = $layer(b, v, c)
    e = QuantizeLinear(d, sy, py)
    y = DequantizeLinear(e, sy, py)"""
LAYERS = {  # input, the layer before with its weight, shape of the layer's own
    "Conv": ("float[N,3,3,3] x", "Conv", (8, 3, 1, 1), (6, 8, 1, 1)),
    "Gemm<transB=1>": ("float[N,3] x", "MatMul", (3, 8), (6, 8)),
}


def chain(layer: str, *, per_channel: bool) -> ir.Model:
    """One layer as quantisers write it: the bias in steps of the input's times the weight's."""
    signature, first, before, shape = LAYERS[layer]
    scale = scales(6) * np.float32([1, 1, 1, 0, 1, 1]) if per_channel else scalar(0.01)
    weights = {"w": before, "sx": scalar(0.02), "px": np.uint8(128), "sy": scalar(0.1), "py": np.uint8(128)}
    weights |= {"q": codes(shape), "sw": scale, "qb": codes((6,), "int32"), "sb": np.float32(0.02) * scale}
    return tiny(f"{signature} => float[] y", lines(CHAIN, layer=layer, first=first), weights, recorded=False)


def optimised(model: ir.Model, given: dict[str, Array], folder: Path) -> tuple[Array, Counter[str]]:
    """The output as the runtime computes it with fused kernels, and which ops it ran."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    handle = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    ran = Counter(n.op_type for n in onnx.load(folder / "optimised.onnx").graph.node)
    return handle.run(None, given)[0], ran


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_biases_follow_scales_that_grew(layer: str, per_channel: bool, tmp_path: Path) -> None:
    """Old releases of the runtime add the integers of a bias unseen; newer ones look and do not fuse any more."""
    model = chain(layer, per_channel=per_channel)
    # Small inputs: sums of large 8-bit products saturate in the kernels of x86 processors without VNNI.
    survey, given = survey_of(model, feed(model)), {name: array / 16 for name, array in feed(model).items()}
    arrays = {v.name: v.const_value.numpy() for v in model.graph.initializers.values()}
    old = survey.facts.stored["v"].decode(arrays.__getitem__)
    new = old * np.float32([3, 1, 2, 1, 1, 0.5]).reshape(6, *[1] * (old.ndim - 1))
    slim = model.clone()
    apply(slim.graph, survey, Ledger(dead=np.zeros(survey.ids, dtype=bool), arrays={"v": new}))
    fresh = {v.name: v.const_value.numpy() for v in slim.graph.initializers.values()}
    assert (fresh["sw"] > arrays["sw"]).any()
    np.testing.assert_allclose(fresh["sb"], arrays["sx"] * fresh["sw"], rtol=1e-6)
    np.testing.assert_allclose(fresh["qb"] * fresh["sb"], arrays["qb"] * arrays["sb"], atol=0.51 * fresh["sb"].max())
    assert not per_channel or fresh["qb"][3] == arrays["qb"][3]  # a channel of zeros
    fused, ran = optimised(slim, given, tmp_path)
    assert ran["QLinearConv"] == (layer == "Conv")
    assert np.abs(fused - run(slim, given)["y"]).max() < 0.11  # a step of the output: ties may round either way


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_the_bias_of_a_layer_is_known_and_shifts_in_its_steps(layer: str, per_channel: bool) -> None:
    model = chain(layer, per_channel=per_channel)
    survey = survey_of(model, feed(model))
    arrays = {v.name: v.const_value.numpy() for v in model.graph.initializers.values()}
    (found,) = (c for c in consumers(model, survey) if c.value == "v")
    np.testing.assert_allclose(found.bias, np.broadcast_to(arrays["qb"] * arrays["sb"], 6), rtol=1e-6)
    assert (found.room, found.inner) == ("bias", True)
    shift = np.float32([0.1, 0, -0.2, 0.1, 0, 0.3])
    slim = model.clone()
    apply(slim.graph, survey, Ledger(dead=np.zeros(survey.ids, dtype=bool), arrays={}, shifts={"d": shift}))
    assert [node.op_type for node in slim.graph] == [node.op_type for node in model.graph]
    fresh = {v.name: v.const_value.numpy() for v in slim.graph.initializers.values()}
    steps = np.broadcast_to(arrays["sb"], 6)
    told = np.where(steps > 0, shift, 0)
    np.testing.assert_allclose((fresh["qb"] - arrays["qb"]) * steps, told, atol=0.51 * steps.max())


@pytest.mark.parametrize(("faint", "most", "reason"), [(0.0, 0.0, ""), (0.01, 1e-6, ROUNDED)])
def test_the_fits_of_integer_layers_gain_or_leave_them_alone(faint: float, most: float, reason: str) -> None:
    """Half of the channels carry nothing or next to nothing; the bias is as large as the outputs."""
    weights = {"w": np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)}
    weights["w"][:, 4:] *= faint
    weights |= {"sx": scalar(0.02), "px": np.uint8(0)}
    weights |= {"q": codes((6, 8)), "sw": scalar(0.01), "qb": 9 * codes((6,), "int32"), "sb": scalar(2e-4)}
    body = """
        m = MatMul(x, w)
        k = Relu(m)
        a = QuantizeLinear(k, sx, px)
        b = DequantizeLinear(a, sx, px)
        v = DequantizeLinear<axis=0>(q, sw)
        c = DequantizeLinear<axis=0>(qb, sb)
        y = Gemm<transB=1>(b, v, c)"""
    model = tiny("float[N,3] x => float[] y", body, weights, recorded=False)
    x = np.random.default_rng(1).normal(size=(256, 3)).astype(np.float32)
    data = onnxgrail.compress(model, data={"x": x}, unit_ratio=0.5, round_to=1, compensate="best").report.data
    assert data["verification"]["outputs"][0]["nmse"] <= most
    (fit,) = data["refits"]
    assert (fit["reason"], fit["alpha"]) == (reason, None)
    assert fit["after"] == fit["before"] < 1e-4


def test_a_bias_of_two_layers_follows_for_one() -> None:
    layer = "\n".join(f"d{i} = Gemm<transB=1>(k, v{i}, c)" for i in (0, 1))
    body = f"""
        k = MatMul(x, w)
        v0 = DequantizeLinear(q0, sw)
        v1 = DequantizeLinear(q1, sw)
        c = DequantizeLinear(qb, sb)
        {layer}
        y = Concat<axis=1>(d0, d1)"""
    weights = {"w": (3, 8), "q0": codes((6, 8)), "q1": codes((6, 8), seed=1), "sw": scalar(0.01)}
    weights |= {"qb": codes((6,), "int32"), "sb": scalar(2e-4)}
    model = tiny("float[N,3] x => float[] y", body, weights)
    survey = survey_of(model, feed(model))
    slim = model.clone()
    new = 2.0 * weights["q0"].astype(np.float32) * np.float32(0.01)
    apply(slim.graph, survey, Ledger(dead=np.zeros(survey.ids, dtype=bool), arrays={"v0": new}))
    first, second = (n.inputs[2].producer() for n in slim.graph if n.op_type == "Gemm")
    scales_now = [n.inputs[1].const_value.numpy() for n in (first, second)]
    np.testing.assert_allclose(scales_now, [4e-4, 2e-4], rtol=1e-6)
    np.testing.assert_array_equal(first.inputs[0].const_value.numpy(), np.rint(weights["qb"] / 2))
    np.testing.assert_array_equal(second.inputs[0].const_value.numpy(), weights["qb"])
