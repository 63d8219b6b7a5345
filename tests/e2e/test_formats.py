"""Half precision: float16, bfloat16 and mixtures of them with float32 are narrowed as exactly as float32 is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.graph.io import model_file
from onnxgrail.graph.io.serial import to_bytes
from tests import oracle, tiny

HALF = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
NARROW = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}
MODELS = {"mlp": tiny.mlp, "cnn": tiny.cnn}


def halved(model: ir.Model, kind: str, *, keep: str = "") -> ir.Model:
    """All weights and tensors in half precision between a float32 input and output.

    Weights whose names begin with one of the letters in `keep` stay float32 and are cast where they are read.
    """
    proto = ir.to_proto(model)
    graph, to = proto.graph, NARROW[kind]
    casts = []
    for tensor in graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype != np.float32:
            continue
        if tensor.name[0] in keep:
            name, tensor.name = tensor.name, f"{tensor.name}/single"
            casts.append(onnx.helper.make_node("Cast", [tensor.name], [name], name=f"{name}/cast", to=to))
        else:
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(HALF[kind]), tensor.name))
    (x,), (y,) = graph.input, graph.output
    nodes = list(graph.node)
    for node in nodes:
        node.input[:] = ["x/half" if name == x.name else name for name in node.input]
        node.output[:] = ["y/half" if name == y.name else name for name in node.output]
    casts.append(onnx.helper.make_node("Cast", [x.name], ["x/half"], name="in", to=to))
    nodes.append(onnx.helper.make_node("Cast", ["y/half"], [y.name], name="out", to=onnx.TensorProto.FLOAT))
    del graph.node[:], graph.value_info[:]
    graph.node.extend([*casts, *nodes])
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def single(model: ir.Model) -> ir.Model:
    """The model in float32 with the same numbers."""
    proto = ir.to_proto(model)
    for tensor in proto.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype in HALF.values():
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float32), tensor.name))
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to":
                attribute.i = onnx.TensorProto.FLOAT
    del proto.graph.value_info[:]
    return ir.from_proto(proto)


def weights(model: ir.Model) -> dict[str, np.ndarray]:
    return {n: v.const_value.numpy() for n, v in model.graph.initializers.items()}


def compressed(model: ir.Model, **choices: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    data = tiny.feed(model, N=64)["x"].astype(HALF["bf16"]).astype(np.float32)
    result = onnxgrail.compress(ir.to_proto(model), data={"x": data}, round_to=1, **choices)
    return weights(result.model), dict(result.report.data)


@pytest.mark.parametrize("keep", ["", "a", "cw"], ids=["all", "mixed", "consumers in float32"])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_narrowing_is_masking(name: str, kind: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "fp16":  # sums in another order are rounded to another neighbour
        monkeypatch.setattr(oracle, "TOLERANCE", 5e-3)
        monkeypatch.setattr(oracle, "EFFECT", 5e-2)
    model = halved(MODELS[name](), kind, keep=keep)
    survey = oracle.narrowed_equals_masked(model, tiny.feed(model))
    plain = oracle.survey_of(MODELS[name](), tiny.feed(MODELS[name]()))
    assert len(survey.blocks) == len(plain.blocks)


@pytest.mark.parametrize("keep", ["", "a"], ids=["all", "mixed"])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_types_stay_and_the_file_is_sound(kind: str, keep: str, tmp_path: Path) -> None:
    model = halved(tiny.mlp(), kind, keep=keep)
    source, target = tmp_path / "m.onnx", tmp_path / "o.onnx"
    source.write_bytes(ir.to_proto(model).SerializeToString())
    for compensate in ("none", "grail", "best"):
        data = {"x": tiny.feed(model, N=64)["x"]}
        result = onnxgrail.compress(source, target, data=data, unit_ratio=0.5, compensate=compensate, force=True)
        report = result.report.data
        before, after = weights(model), weights(model_file.load(target))
        assert all(array.dtype == before[name].dtype for name, array in after.items() if name in before)
        assert {a.dtype for a in after.values()} <= {HALF[kind], *(a.dtype for a in before.values())}
        assert sum(a.size for a in after.values()) < sum(a.size for a in before.values())
        onnx.checker.check_model(target, full_check=True)
        assert report["verification"]["outputs"][0]["cosine"] > 0.5
        assert any("bfloat16" in note for note in report["notes"]) == (kind == "bf16")
    found = onnxgrail.compare(source, target, data={"x": tiny.feed(model, N=64)["x"]})
    assert found.outputs[0].cosine == pytest.approx(report["verification"]["outputs"][0]["cosine"], abs=0.05)


def test_bfloat16_is_fitted_in_float32_and_rounded_once() -> None:
    model = halved(tiny.mlp(depth=1), "bf16")
    choices = {"unit_ratio": 0.5, "blocks": ("mlp",), "check": False, "compensate": "grail"}
    got, _ = compressed(model, **choices)
    want, _ = compressed(single(model), **choices)
    changed = [n for n in got if n.startswith("c") and not np.array_equal(got[n], weights(model)[n][: len(got[n])])]
    assert changed
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array.astype(HALF["bf16"]))


def test_bfloat16_inputs_and_outputs(tmp_path: Path) -> None:
    proto = ir.to_proto(halved(tiny.mlp(), "bf16"))
    nodes = [n for n in proto.graph.node if n.name not in ("in", "out")]
    del proto.graph.node[:], proto.graph.value_info[:]
    proto.graph.node.extend(nodes)
    for value, name in ((proto.graph.input[0], "x/half"), (proto.graph.output[0], "y/half")):
        value.name, value.type.tensor_type.elem_type = name, onnx.TensorProto.BFLOAT16
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    result = onnxgrail.compress(path, unit_ratio=0.5)
    assert result.report.data["verification"]["outputs"][0]["cosine"] > 0.3
    out = onnx.load(result.output)
    onnx.checker.check_model(out, full_check=True)
    types = {v.type.tensor_type.elem_type for v in (*out.graph.input, *out.graph.output)}
    assert types == {onnx.TensorProto.BFLOAT16}


def test_weights_are_widened_one_session_at_a_time() -> None:
    model = halved(tiny.mlp(), "bf16")
    proto = onnx.ModelProto.FromString(to_bytes(model))
    kinds = {t.name: t.data_type for t in proto.graph.initializer}
    assert set(kinds.values()) == {onnx.TensorProto.BFLOAT16}
    assert {n.input[0] for n in proto.graph.node if n.op_type == "Cast"} >= kinds.keys()


# -------------------------------------------------------------------------------------------------------- overflow


def copies(size: float) -> ir.Model:
    """Four equal neurons: a fit has to put the weights of those that go onto those that stay."""
    rng = np.random.default_rng(0)
    column = (rng.random((5, 1)) * 1e-4).astype(np.float32)
    body = "h = MatMul(x, a)\nr = Relu(h)\ny = MatMul(r, c)"
    weights = {"a": np.repeat(column, 4, axis=1), "c": np.full((4, 3), size, np.float32)}
    return halved(tiny.tiny("float[N,5] x => float[N,3] y", body, weights), "fp16")


def fitted(size: float, ratio: float) -> tuple[np.ndarray, dict[str, Any]]:
    model = copies(size)
    data = {"x": np.abs(tiny.feed(model, N=64)["x"])}
    result = onnxgrail.compress(ir.to_proto(model), data=data, unit_ratio=ratio, round_to=1)
    return weights(result.model)["c"].astype(np.float64), dict(result.report.data)


def test_what_fits_is_not_clamped() -> None:
    array, report = fitted(2e4, 0.5)
    assert array == pytest.approx(np.full((2, 3), 4e4), rel=1e-2)
    assert report["blocks"][0]["outcome"] == {"status": "ok", "reason": "", "clamped": 0}


def test_a_little_too_much_is_clamped_and_counted() -> None:
    array, report = fitted(4e4, 0.5)
    assert (array == np.finfo(np.float16).max).all()
    assert report["blocks"][0]["outcome"]["clamped"] == 6
    assert "6 new weights in 1 blocks were clamped to the range of their number format" in report["notes"]


def test_far_too_much_keeps_the_plain_weights() -> None:
    array, report = fitted(4e4, 0.75)
    np.testing.assert_array_equal(array, np.full((1, 3), np.float16(4e4)))
    block = report["blocks"][0]
    assert block["outcome"]["status"] == "plain"
    assert "beyond the range of their number format, by up to 2.4 times" in block["outcome"]["reason"]
    assert block["error"]["compensated"] == block["error"]["plain"]
