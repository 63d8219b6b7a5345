"""Weights in nodes of type Constant, and matrices that multiply vectors, are stored in a few bits as others are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.graph.io.serial import to_bytes
from tests.forms import as_nodes
from tests.oracle import run
from tests.tiny import ints, tiny

IMAGES = np.random.default_rng(0).standard_normal((32, 3, 6, 6)).astype(np.float32)
ROWS = [{"x": row} for row in np.random.default_rng(0).standard_normal((48, 16)).astype(np.float32)]


def net(*, nodes: bool) -> ir.Model:
    """Convolutions and a matrix, whose weights are initializers or nodes, as PaddlePaddle writes them."""
    model = tiny(
        "float[N,3,6,6] x => float[] y",
        "a = Conv(x, w0)\nb = Relu(a)\nc = Conv(b, w1)\nd = Relu(c)\ne = GlobalAveragePool(d)\nf = Flatten(e)\n"
        "g = MatMul(f, w2)\nh = Relu(g)\ny = MatMul(h, w3)",
        {"w0": (64, 3, 3, 3), "w1": (64, 64, 3, 3), "w2": (64, 256), "w3": (256, 8)},
    )
    return as_nodes(model) if nodes else model


def small(model: ir.Model | bytes, data: Any, folder: Path, **options: Any) -> tuple[int, dict[str, Any], ir.Model]:
    """The bytes of a result, its report and the result."""
    path = folder / "small.onnx"
    result = onnxgrail.compress(model, path, data=data, force=True, **options)
    return path.stat().st_size, result.report.data, result.model


@pytest.mark.parametrize(
    "options", [{"ratio": 0, "quantize": "int4"}, {"unit_ratio": 0.3, "quantize": "int4"}, {"target_size": "25%"}]
)
def test_weights_in_nodes(options: dict[str, Any], tmp_path: Path) -> None:
    whole, _, _ = small(net(nodes=True), {"x": IMAGES}, tmp_path, ratio=0)
    size, report, model = small(net(nodes=True), {"x": IMAGES}, tmp_path, **options)
    same, others, _ = small(net(nodes=False), {"x": IMAGES}, tmp_path, **options)
    assert size < 0.3 * whole
    assert abs(size - same) < 0.05 * same
    entries = [r["quantization"]["matrices"] for r in (report, others)]
    forms = [{(one["weight"].partition("/")[0], one["bits"]) for one in found} for found in entries]
    assert forms[0] == forms[1]
    assert run(model, {"x": IMAGES})["y"].shape == (32, 8)


def policy(shape: str) -> ir.Model:
    """A policy of a robot, whose input is one observation, with a batch or without."""
    return tiny(
        f"float[{shape}] x => float[] y",
        "a = MatMul(x, w0)\nb = Elu(a)\nc = MatMul(b, w1)\nd = Elu(c)\ny = MatMul(d, w2)",
        {"w0": (16, 128), "w1": (128, 128), "w2": (128, 3)},
    )


def test_matrices_that_multiply_vectors_are_fitted(tmp_path: Path) -> None:
    options: dict[str, Any] = {"unit_ratio": 0.3, "compensate": "best"}
    _, report, slim = small(policy("16"), ROWS, tmp_path, **options)
    rows = [{"x": feed["x"][None]} for feed in ROWS]
    _, others, same = small(policy("1,16"), rows, tmp_path, **options)
    assert report["refits"] == others["refits"]
    assert [fit["weight"] for fit in report["refits"]] == ["w1", "w2"]
    for key in ("samples", "notes"):
        assert report["calibration"][key] == others["calibration"][key]
    assert report["verification"] == others["verification"]
    assert report["model"]["macs_before"] == others["model"]["macs_before"] == 16 * 128 + 128 * 128 + 128 * 3
    for name, value in same.graph.initializers.items():
        np.testing.assert_array_equal(slim.graph.initializers[name].const_value.numpy(), value.const_value.numpy())


def test_matrices_that_multiply_vectors(tmp_path: Path) -> None:
    model = policy("16")
    whole, _, _ = small(model, ROWS, tmp_path, ratio=0)
    size, report, slim = small(model, ROWS, tmp_path, ratio=0, quantize="int4")
    assert size < 0.4 * whole
    assert {m["weight"]: m["bits"] for m in report["quantization"]["matrices"]}["w1"] == 4
    far = [np.abs(run(slim, feed)["y"] - run(model, feed)["y"]).max() for feed in ROWS[:4]]
    assert max(far) < 0.5 * max(np.abs(run(model, feed)["y"]).max() for feed in ROWS[:4])


@pytest.mark.parametrize("layer", ["LSTM", "GRU"])
def test_recurrent_layers_have_8_bits(layer: str, tmp_path: Path) -> None:
    gates = {"LSTM": 4, "GRU": 3}[layer]
    model = tiny(
        "float[5,N,8] x => float[] y",
        f"h = {layer}<hidden_size=48>(x, w, r)\ns = Squeeze(h, one)\ny = MatMul(s, out)",
        {"w": (1, 48 * gates, 8), "r": (1, 48 * gates, 48), "out": (48, 5), "one": ints(1)},
    )
    rows = np.random.default_rng(0).standard_normal((5, 32, 8)).astype(np.float32)
    feeds = [{"x": rows}]
    whole, _, _ = small(model, feeds, tmp_path, ratio=0)
    size, report, slim = small(model, feeds, tmp_path, ratio=0, quantize="int4")
    assert size < 0.4 * whole
    entries = report["quantization"]["matrices"]
    forms = {one["weight"]: (one["bits"], one["reason"].partition(";")[0]) for one in entries}
    assert forms["w"] == forms["r"] == (8, "recurrent layers keep more bits")
    assert not report["quantization"]["left"]
    np.testing.assert_allclose(run(slim, feeds[0])["y"], run(model, feeds[0])["y"], atol=0.2)


def test_layers_inside_branches_have_8_bits(tmp_path: Path) -> None:
    """A network for each of two sample rates, one with weights of its own, one with those of the model around it."""
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[N,16] x, bool[] slow) => (float[N,4] y) {
            y = If (slow) <
                then_branch = one () => (float[N,4] y1) { h1 = MatMul(x, outer) r1 = Relu(h1) y1 = MatMul(r1, last) },
                else_branch = two () => (float[N,4] y2) {
                    h2 = MatMul(x, table) r2 = Relu(h2) y2 = MatMul(r2, last) }
            >
        }""")
    rng = np.random.default_rng(0)
    for name, shape in (("outer", (16, 256)), ("table", (16, 256)), ("last", (256, 4))):
        tensor = ir.tensor(rng.normal(size=shape).astype(np.float32), name=name)
        value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape(shape))
        model.graph.register_initializer(value)
    feeds = [{"x": rng.normal(size=(8, 16)).astype(np.float32), "slow": np.array(k % 2 == 0)} for k in range(8)]
    content = to_bytes(model)
    whole, _, _ = small(content, feeds, tmp_path, ratio=0)
    size, report, slim = small(content, feeds, tmp_path, ratio=0, quantize="int4")
    assert size < 0.5 * whole
    reasons = {one["reason"].partition(";")[0] for one in report["quantization"]["matrices"]}
    assert reasons == {"layers inside branches and loops keep more bits"}
    far = np.abs(run(slim, feeds[0])["y"] - run(model, feeds[0])["y"]).max()
    assert 0 < far < 1
    size, report, _ = small(content, feeds, tmp_path, max_loss="5%", minimize="size", only_bits=True)
    assert size < 0.5 * whole
    assert {*report["allocation"]["bits"].values()} == {8}
    assert report["allocation"]["search"]["cost"] < 1.01 * size


def test_the_reason_why_a_file_is_hardly_smaller(tmp_path: Path) -> None:
    model = tiny(
        "float[N,3,6,6] x => float[] y",
        'a = Einsum<equation = "nchw,oc->nohw">(x, w0)\nb = Relu(a)\ny = Einsum<equation = "nchw,oc->nohw">(b, w1)',
        {"w0": (64, 3), "w1": (64, 64)},
    )
    _, report, _ = small(model, {"x": IMAGES}, tmp_path, ratio=0, quantize="int4")
    said = "layers keep their numbers: Einsum has no form with a few bits per weight"
    assert sum(said in note for note in report["quantization"]["notes"]) == 1  # another may tell of measured times
