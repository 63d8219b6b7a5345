"""Means over channels are products where fits repair them, as in blocks of ConvNeXt V2, and stay means elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.observe import observe
from onnxgrail.core import Array
from onnxgrail.errors import NothingToCompressError
from onnxgrail.graph.fittable.means import as_means
from onnxgrail.graph.fittable.mixed import Lacks, traced
from tests.oracle import run
from tests.tiny import tiny

HALF = 8
FORMS = [(True, 20), (True, 17), (False, 20), (False, 17)]
"""True where channels are the last axis, and the opset: before 18, the axes of a mean are an attribute."""


def response_normalized(last: bool = True, opset: int = 20, *, between: str = "") -> ir.Model:
    """A block with a global response normalization, whose hidden channels are all there twice.

    Args:
        last: channels are the last axis.
        opset: of the standard operators.
        between: nodes from the mean `m` to `k`, by which lengths are divided.
    """
    rng = np.random.default_rng(0)
    channel, others = ("-1", "1, 2") if last else ("1", "2, 3")
    axes = {"one": np.array([int(channel)]), "two": np.array([int(axis) for axis in others.split(", ")])}
    one, two = (f"axes=[{channel}], ", f"axes=[{others}], ") if opset < 18 else ("", "")
    and_one, and_two = (", one", ", two") if opset >= 18 else ("", "")
    layer, rest = ("MatMul", ()) if last else ("Conv", (1, 1))
    shape = (HALF,) if last else (HALF, 1, 1)

    def twice(array: Array, axis: int = 0) -> Array:
        return np.concatenate([array, array], axis=axis).astype(np.float32)

    up = rng.normal(size=(6, HALF) if last else (HALF, 6, *rest))
    return tiny(
        f"float[N,{'4,4,6' if last else '6,4,4'}] x => float[] y",
        f"a = {layer}(x, up)\nh = Relu(a)\ng = ReduceL2<{two}keepdims=1>(h{and_two})\n"
        f"m = ReduceMean<{one}keepdims=1>(g{and_one})\n{between or 'k = Identity(m)'}\ns = Add(k, epsilon)\n"
        f"n = Div(g, s)\nt = Mul(h, n)\nu = Mul(t, gain)\nv = Add(u, shift)\nw = Add(v, h)\ny = {layer}(w, down)",
        {
            "up": twice(up, 1 if last else 0),
            "epsilon": np.array(1e-6, np.float32),
            "gain": twice(rng.normal(size=shape)),
            "shift": twice(rng.normal(size=shape)),
            "down": rng.normal(size=(2 * HALF, 5) if last else (5, 2 * HALF, *rest)).astype(np.float32),
            **({} if opset < 18 else axes),
        },
        opset=opset,
    )


def data_of(model: ir.Model) -> dict[str, Array]:
    """Calibration data."""
    shape = model.graph.inputs[0].shape
    assert shape is not None
    sizes = [64, *(int(str(size)) for size in shape[1:])]
    return {"x": np.random.default_rng(3).normal(size=sizes).astype(np.float32)}


def ops(model: ir.Model) -> list[str]:
    """The operators of a graph."""
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize(("last", "opset"), FORMS)
def test_channels_that_are_there_twice_go_without_loss(last: bool, opset: int) -> None:
    model = response_normalized(last, opset)
    data = data_of(model)
    result = onnxgrail.compress(model, data=data, unit_ratio=0.5, round_to=1)
    (block,) = result.report.data["blocks"]
    assert block["kept"] == HALF
    assert "ReduceMean" not in ops(result.model)
    want, got = run(model, data)["y"], run(result.model, data)["y"]
    assert np.square(got - want).sum() < 1e-5 * np.square(want).sum()


@pytest.mark.parametrize(("last", "opset"), FORMS)
def test_a_product_computes_the_mean_and_becomes_it_again(last: bool, opset: int) -> None:
    model = response_normalized(last, opset)
    feed = {name: array[:3] for name, array in data_of(model).items()}
    written, survey = traced(model, observe(model, feed), Lacks())
    assert "ReduceMean" not in ops(written)
    assert len(survey.blocks) == 1
    np.testing.assert_allclose(run(written, feed)["y"], run(model, feed)["y"], rtol=1e-5, atol=1e-5)
    as_means(written)
    assert ops(written) == ops(model)
    np.testing.assert_array_equal(run(written, feed)["y"], run(model, feed)["y"])


@pytest.mark.parametrize("options", [{"compensate": "grail"}, {"reducer": "fold"}])
def test_other_compensations_repair_the_mean_too(options: dict[str, Any]) -> None:
    model = response_normalized()
    data = data_of(model)
    result = onnxgrail.compress(model, data=data, unit_ratio=0.5, round_to=1, **options)
    want, got = run(model, data)["y"], run(result.model, data)["y"]
    assert np.square(got - want).sum() < 1e-4 * np.square(want).sum()


def test_report_counts_the_model_as_it_was() -> None:
    model = response_normalized()
    data, plain = data_of(model), onnxgrail.inspect(model)
    for options in ({"unit_ratio": 0.5}, {"ratio": 0.0}):
        told: dict[str, Any] = onnxgrail.compress(model, data=data, **options).report.data["model"]
        assert told["params_before"] == plain.params == 6 * 2 * HALF + 2 * 2 * HALF + 2 * HALF * 5 + 1
        assert told["macs_before"] == plain.macs == 4 * 4 * (6 + 5) * 2 * HALF


@pytest.mark.parametrize(("options", "needs"), [({}, "--data"), ({"compensate": "none"}, "--compensate grail or best")])
def test_without_a_repair_the_mean_stays_and_the_reason_names_the_option(options: dict[str, Any], needs: str) -> None:
    model = response_normalized()
    data = data_of(model) if options else None
    with pytest.raises(NothingToCompressError, match=f"it is narrowed with {needs} only"):
        onnxgrail.compress(model, data=data, ratio=0.5, **options)


def test_inspect_shows_what_data_allow() -> None:
    found = onnxgrail.inspect(response_normalized())
    assert [block["units"] for block in found.blocks] == [2 * HALF]


def test_a_mean_stays_that_other_nodes_keep_whole() -> None:
    model = response_normalized(between="top = ReduceMax<keepdims=1>(g, one)\nk = Add(m, top)")
    feed = {name: array[:3] for name, array in data_of(model).items()}
    written, survey = traced(model, observe(model, feed), Lacks())
    assert written is model
    assert not survey.blocks


def test_normalizations_keep_their_means() -> None:
    model = tiny(
        "float[N,S,6] x => float[] y",
        "h = MatMul(x, up)\nm = ReduceMean<axes=[-1], keepdims=1>(h)\nd = Sub(h, m)\nq = Pow(d, two)\n"
        "v = ReduceMean<axes=[-1], keepdims=1>(q)\ne = Add(v, epsilon)\nr = Sqrt(e)\nz = Div(d, r)\n"
        "y = MatMul(z, down)",
        {
            "up": (6, 8), "down": (8, 5), "two": np.array(2, np.float32), "epsilon": np.array(1e-5, np.float32)
        },
        opset=17,
    )  # fmt: skip
    feed = {"x": np.random.default_rng(1).normal(size=(2, 5, 6)).astype(np.float32)}
    written, survey = traced(model, observe(model, feed), Lacks())
    assert ops(written) == ops(model)
    assert len(survey.blocks) == 1
