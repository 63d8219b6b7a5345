"""Static quantization: which layers stay in float, and the graph in which they do."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.prepare import prepare as calibrated
from onnxgrail.calibration.quantize import form
from onnxgrail.calibration.quantize.choose import choose
from onnxgrail.calibration.quantize.eight import AFTER, BETWEEN, ROUNDED, Source, by_tool
from onnxgrail.calibration.quantize.prepare import prepare
from onnxgrail.calibration.quantize.static import Static, Trials, quantise_static
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.core import Array, Feed, Recipe
from onnxgrail.errors import ModelError
from onnxgrail.graph.bits.exempt import exempted
from onnxgrail.graph.io.model_file import load, save
from onnxgrail.graph.io.opset import opset_of, raised
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.machine.job import Job
from onnxgrail.narrowing.bits.halves import halves_of
from tests.tiny import tiny

RNG = np.random.default_rng(3)
KINDS = (*ROUNDED, *AFTER, *BETWEEN)
BODY = """
    a = Conv<pads = [1, 1, 1, 1]>(x, w0, b0)
    r = Relu(a)
    c = Conv<pads = [1, 1, 1, 1]>(r, w1, b1)
    s = Sigmoid(c)
    d = Mul(c, s)
    e = Conv(d, w2, b2)
    y = Conv(d, w3)
"""
WEIGHTS = {
    "w0": (8, 3, 3, 3),
    "b0": (8,),
    "w1": (8, 8, 3, 3),
    "b1": (8,),
    "w2": (4, 8, 1, 1),
    "b2": (4,),
    "w3": (5, 8, 1, 1),
}
SIGNATURE = "float[N,3,6,6] x => float[N,5,6,6] y, float[N,4,6,6] e"
FEED = {"x": RNG.normal(size=(8, 3, 6, 6)).astype(np.float32)}


def outputs(model: ir.Model | Path, feed: Feed = FEED) -> list[Array]:
    with open_session(model if isinstance(model, Path) else to_bytes(model)) as session:
        return list(session.run(feed).values())


def prepared(folder: Path, model: ir.Model) -> Source:
    """The float model as it is prepared for ONNX Runtime's tool."""
    save(model, folder / "source.onnx")
    prepare(folder / "source.onnx", folder / "prepared.onnx")
    return Source(folder / "prepared.onnx", load((folder / "prepared.onnx").read_bytes()), {}, {})


def written(folder: Path, model: ir.Model, without: Collection[str] = ()) -> tuple[ir.Model, ir.Model]:
    """The prepared float model, and what ONNX Runtime's tool makes of it."""
    origin = prepared(folder, model)
    return origin.ready, by_tool(origin, [FEED], folder / "target.onnx", without=without)


def with_next(model: ir.Model, layers: Collection[str]) -> set[str]:
    """The layers, and what directly follows them and has their side."""
    makers = {node: node.inputs[0].producer() for node in model.graph if node.op_type in AFTER}
    return {*layers, *(node.name for node, maker in makers.items() if maker and maker.name in layers)}


def test_layers_in_float_equal_those_that_the_tool_leaves_out(tmp_path: Path) -> None:
    ready, whole = written(tmp_path, tiny(SIGNATURE, BODY, WEIGHTS))
    names = [node.name or "" for node in ready.graph if node.op_type == "Conv"]
    for number in range(len(names) + 1):
        for some in itertools.combinations(names, number):
            _, tool = written(tmp_path, tiny(SIGNATURE, BODY, WEIGHTS), some)
            ours = exempted(whole, ready, with_next(ready, some), (*ROUNDED, *AFTER))
            stays = {node.name for node in tool.graph if node.op_type == "Conv" and node.name not in some}
            far = [np.abs(a - b).max() for a, b in zip(outputs(ours), outputs(tool), strict=True)]
            assert len(stays) == len(names) - number
            assert all(value.dtype == ir.DataType.FLOAT and value.shape is not None for value in ours.graph.outputs)
            # The tool rounds what a Relu after a float layer writes, and what a float layer shares with a rounded one.
            assert some or not any(far)
            assert max(far) <= 0.06 * max(np.abs(value).max() for value in outputs(tool)), some
    exact = exempted(whole, ready, with_next(ready, names), (*ROUNDED, *AFTER))
    for a, b in zip(outputs(exact), outputs(ready), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert not any(node.op_type.endswith("QuantizeLinear") for node in exact.graph)
    assert set(exact.graph.initializers) == {f"{n}_float" if n[0] == "b" else n for n in WEIGHTS}
    assert [value.name for value in exact.graph.outputs] == ["y", "e"]


def test_nodes_in_float_read_constants_as_they_were(tmp_path: Path) -> None:
    """The tool rounds a constant for all readers: a runtime would convert it back in each run."""
    body = """
        a = Conv(x, w, b)
        s = Add(a, six)
        d = Div(s, six)
        y = Conv(d, v)
    """
    weights = {"w": (8, 3, 1, 1), "b": (8,), "v": (8, 8, 1, 1), "six": np.array(6, np.float32)}
    model = tiny("float[N,3,6,6] x => float[N,8,6,6] y", body, weights)
    origin = prepared(tmp_path, model)
    between = [node.name or "" for node in origin.between()]
    assert [node.op_type for node in origin.between()] == ["Add"]
    whole = by_tool(origin, [FEED], tmp_path / "target.onnx", between=between)
    (tool, ours) = (
        {node.op_type: node for node in one.graph} for one in (whole, exempted(whole, origin.ready, (), KINDS))
    )
    assert tool["Div"].inputs[1].producer() is not None
    assert ours["Div"].inputs[1].is_initializer()
    assert ours["Add"].inputs[1].producer() is not None


@pytest.mark.parametrize("bad", [("l3",), ("l0", "l1"), ("l2", "l9", "l17")])
def test_layers_that_lose_most_are_found(bad: tuple[str, ...]) -> None:
    harms = {f"l{n}": 0.1 if f"l{n}" in bad else 1e-4 for n in range(20)}
    tried: list[frozenset[str]] = []

    def loss(names: frozenset[str]) -> float:
        tried.append(names)
        return sum(harm for name, harm in harms.items() if name not in names)

    found = choose(dict.fromkeys(harms, 10), loss, target=0.01)
    assert set(found.layers) == set(bad)
    assert found.before == pytest.approx(sum(harms.values()))
    assert found.after <= 0.01
    assert len(tried) == len(set(tried)) < 60


def test_a_layer_that_holds_the_weights_is_not_worth_a_little() -> None:
    sizes = {"first": 10, "head": 1000}
    found = choose(sizes, lambda names: 0.02 if "head" in names else 0.04, target=0.01)
    assert found.layers == ()


def test_where_everything_is_lost_layers_with_outliers_begin() -> None:
    """Each alone changes nothing: the model is broken as long as one of them is rounded."""
    sizes = {f"l{n}": 10 for n in range(12)}
    broken = {"l1", "l5", "l8"}
    found = choose(sizes, lambda n: 0.005 if broken <= n else 1.0, target=0.01, outliers=[*broken, "l2", "l3"])
    assert set(found.layers) == broken
    assert choose(sizes, lambda n: 0.005 if broken <= n else 1.0, target=0.01).layers == ()


def test_losses_that_are_no_numbers() -> None:
    found = choose({"a": 1, "b": 1}, lambda names: 0.0 if "a" in names else float("nan"), target=0.01)
    assert found.layers == ("a",)


def test_unnamed_nodes_are_quantised(tmp_path: Path) -> None:
    model = tiny(SIGNATURE, BODY, WEIGHTS)
    for node in model.graph:
        node.name = None
    _, whole = written(tmp_path, model)
    assert sum(node.op_type == "QuantizeLinear" for node in whole.graph) > 4
    assert len({node.name for node in whole.graph}) == len(whole.graph)


def test_shared_biases_get_names_of_their_own(tmp_path: Path) -> None:
    """The tool would name its second copy like the tensor."""
    body = """
        bias0 = Conv<pads = [1, 1, 1, 1]>(x, w0, bias)
        y = Conv<pads = [1, 1, 1, 1]>(bias0, w1, bias)
    """
    weights = {"w0": (8, 3, 3, 3), "w1": (8, 8, 3, 3), "bias": (8,)}
    ready, whole = written(tmp_path, tiny("float[N,3,6,6] x => float[N,8,6,6] y", body, weights))
    far = np.abs(outputs(whole)[0] - outputs(ready)[0]).max()
    assert 0 < far < 0.1 * np.abs(outputs(ready)[0]).max()


def test_tensors_that_the_runtime_adds_get_names_that_it_does_not_give_again(tmp_path: Path) -> None:
    text = "m = MatMul(x, w)\na = Add(m, b)\ny = Relu(a)"
    model = tiny("float[2,3,8] x => float[2,3,4] y", text, {"w": (8, 4), "b": (4,)})
    save(model, tmp_path / "source.onnx")
    prepare(tmp_path / "source.onnx", tmp_path / "prepared.onnx")
    ready = load((tmp_path / "prepared.onnx").read_bytes())
    added = {value.name for node in ready.graph for value in node.outputs} - {"m", "a", "y"}
    added |= set(ready.graph.initializers) - {"w", "b"}
    assert added
    assert all(str(name).startswith("folded/") for name in added)
    feed = {"x": RNG.normal(size=(2, 3, 8)).astype(np.float32)}
    np.testing.assert_allclose(outputs(ready, feed)[0], outputs(model, feed)[0], atol=1e-6)


def test_constants_that_repeat_are_not_stored_repeated(tmp_path: Path) -> None:
    body = """
        a = Conv<pads = [1, 1, 1, 1]>(x, w0, b0)
        s = Expand(slope, shape)
        y = PRelu(a, s)
    """
    weights = {"w0": (8, 3, 3, 3), "b0": (8,), "slope": (8, 1, 1), "shape": np.array([8, 64, 64])}
    model = tiny("float[N,3,64,64] x => float[N,8,64,64] y", body, weights)
    save(model, tmp_path / "source.onnx")
    prepare(tmp_path / "source.onnx", tmp_path / "prepared.onnx")
    assert (tmp_path / "prepared.onnx").stat().st_size < 8 * 64 * 64


def test_grouped_transposed_convolutions_stay_in_float(tmp_path: Path) -> None:
    body = """
        a = Conv<pads = [1, 1, 1, 1]>(x, w0, b0)
        y = ConvTranspose<group = 2>(a, w, b)
    """
    weights = {"w0": (8, 3, 3, 3), "b0": (8,), "w": (8, 2, 2, 2), "b": (4,)}
    save(tiny("float[N,3,6,6] x => float[N,4,7,7] y", body, weights), tmp_path / "source.onnx")
    target = tmp_path / "target.onnx"
    given = Static(feeds=[FEED], everywhere=True, trials=Trials(lambda _: 0, 0, lambda *_: 1))
    kept, why = quantise_static(tmp_path / "source.onnx", target, given)
    assert len(kept) == 1
    assert "grouped" in why
    assert outputs(target)[0].shape == (8, 4, 7, 7)


def test_a_search_for_another_machine_has_the_same_layers_in_float_in_all_candidates(tmp_path: Path) -> None:
    save(tiny(SIGNATURE, BODY, WEIGHTS), tmp_path / "source.onnx")
    names = [node.name or "" for node in tiny(SIGNATURE, BODY, WEIGHTS).graph if node.op_type == "Conv"]
    for some in (names[:1], names[1:], names):
        target = tmp_path / "target.onnx"
        kept, _ = quantise_static(tmp_path / "source.onnx", target, Static(feeds=[FEED], everywhere=True, half=some))
        weights = {node.name: node.inputs[1] for node in load(target.read_bytes()).graph if node.op_type == "Conv"}
        assert {*some} <= {*kept}
        assert {name for name, value in weights.items() if value is not None and value.is_initializer()} == {*kept}
    model = ir.to_proto(tiny(SIGNATURE, BODY, WEIGHTS))
    recipe = Recipe(max_loss=1e-6, quantize="int8", qdq=True)
    read = calibrated(model, FEED, Job(recipe=recipe), held_out=0)
    assert {*halves_of(read, recipe)} <= {*names} != set()
    assert halves_of(read, recipe)
    assert not halves_of(read, Recipe(ratio=0.3, quantize="int8", qdq=True))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_old_opsets_are_converted_for_int8(mode: str) -> None:
    """The converter drops how an old Upsample reads its input."""
    body = f"""
        a = Conv<pads = [1, 1, 1, 1]>(x, w0, b0)
        r = Relu(a)
        u = Upsample<mode = "{mode}">(r, scales)
        y = Conv(u, w2)
    """
    weights = {"w0": (8, 3, 3, 3), "b0": (8,), "scales": np.array([1, 1, 2, 2], np.float32), "w2": (4, 8, 1, 1)}
    model = tiny("float[N,3,6,6] x => float[N,4,12,12] y", body, weights, opset=9, ir_version=4, recorded=False)
    newer = raised(model, 13)
    assert opset_of(newer) == 13
    np.testing.assert_allclose(outputs(newer)[0], outputs(model)[0], atol=1e-6)
    made = onnxgrail.compress(ir.to_proto(model), data=FEED, quantize="int8", qdq=True, unit_ratio=0, held_out=0)
    entry = made.report.data["quantization"]
    assert "opset 9 has no scales per channel: the model was converted to opset 13" in entry["notes"]
    assert entry["ops"]["QuantizeLinear"] > 1
    assert entry["outputs"][0]["cosine"] > 0.99


def test_a_conversion_that_changes_outputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ir.to_proto(tiny(SIGNATURE, BODY, WEIGHTS, opset=12, ir_version=7))
    other = tiny(SIGNATURE, BODY, WEIGHTS, opset=13, seed=1)
    monkeypatch.setattr(form, "raised", lambda *_: other)
    with pytest.raises(ModelError, match="its outputs change when it is converted"):
        onnxgrail.compress(model, data=FEED, quantize="int8", unit_ratio=0.3)
    monkeypatch.undo()
    proto = onnx.ModelProto.FromString(model.SerializeToString())
    monkeypatch.setattr(
        "onnxgrail.graph.io.opset.convert_version", lambda *_: (_ for _ in ()).throw(RuntimeError("no"))
    )
    with pytest.raises(ModelError, match="has opset 12 and cannot be converted to 13: no"):
        onnxgrail.compress(proto, data=FEED, quantize="int8", unit_ratio=0.3)


@pytest.mark.parametrize("kind", ["int8", "int8-dynamic"])
def test_layers_behind_operators_of_the_runtime_get_8_bits(kind: str, tmp_path: Path) -> None:
    """Shape inference of the standard does not know the types that these operators compute."""
    body = """
        a = com.microsoft.MultiHeadAttention <num_heads: int = 4> (x, x, x)
        h = MatMul(a, w)
        g = com.microsoft.Gelu(h)
        b = MatMul(g, v)
        l = com.microsoft.SkipLayerNormalization(b, x, s)
        y = MatMul(l, u)
    """
    weights = {"w": (32, 64), "v": (64, 32), "u": (32, 32), "s": (32,)}
    model = tiny("float[N,8,32] x => float[N,8,32] y", body, weights, imports={"com.microsoft": 1})
    data = {"x": np.random.default_rng(0).normal(size=(16, 8, 32)).astype(np.float32)}
    made = onnxgrail.compress(ir.to_proto(model), data=data, quantize=kind, qdq=True, ratio=0, held_out=0)
    entry = made.report.data["quantization"]
    assert entry["kept_float"] == []
    assert entry["ops"]["DequantizeLinear" if kind == "int8" else "MatMulInteger"] >= 3
    assert entry["outputs"][0]["cosine"] > 0.99


def test_attention_of_the_standard_stays_in_float() -> None:
    """The tool would make the fused operator of ONNX Runtime of it, which has the same name and other inputs."""
    body = "q = MatMul(x, u)\na = Attention <q_num_heads: int = 4, kv_num_heads: int = 4> (q, x, x)\ny = MatMul(a, w)"
    model = tiny("float[N,8,32] x => float[N,8,64] y", body, {"u": (32, 32), "w": (32, 64)}, opset=23)
    data = {"x": np.random.default_rng(0).normal(size=(16, 8, 32)).astype(np.float32)}
    made = onnxgrail.compress(ir.to_proto(model), data=data, quantize="int8-dynamic", ratio=0, held_out=0)
    entry = made.report.data["quantization"]
    assert entry["ops"]["MatMulInteger"] == 2
    assert entry["outputs"][0]["cosine"] > 0.99
