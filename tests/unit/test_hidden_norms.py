"""Normalizations of hidden channels run over the channels that stay, where layers after them are fitted."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.observe import observe
from onnxgrail.core import Array, Bools
from onnxgrail.errors import NothingToCompressError
from onnxgrail.graph.fittable.hidden import hidden_norms, leave_out
from onnxgrail.graph.fittable.mixed import Lacks, traced
from onnxgrail.graph.rotate.norms import norms_of
from tests.oracle import run
from tests.tiny import tiny

HALF = 8
WRITTEN = (
    "m = ReduceMean<axes=[-1]>(h)\nd = Sub(h, m)\nq = Pow(d, two)\nv = ReduceMean<axes=[-1]>(q)\ne = Add(v, epsilon)\n"
    "r = Sqrt(e)\nu = Div(d, r)\ns = Mul(u, gain)\nn = Add(s, shift)"
)
ROOT = "q = Mul(h, h)\nv = ReduceMean<axes=[-1]>(q)\ne = Add(v, epsilon)\nr = Sqrt(e)\nu = Div(h, r)\nn = Mul(u, gain)"
NORMS = {
    "layer": "n = LayerNormalization<axis=-1, epsilon=0.001>(h, gain, shift)",
    "layer without shift": "n = LayerNormalization<axis=-1>(h, gain)",
    "layer, written out": WRITTEN,
    "root": "n = SimplifiedLayerNormalization<axis=-1, epsilon=0.001>(h, gain)",
    "root, written out": ROOT,
}
GATED = "b = MatMul(x, beside)\nc = Sigmoid(b)\nh = Mul(a, c)"


def normalized(norm: str, *, between: str = "h = Relu(a)", rest: str = "y = MatMul(t, down)") -> ir.Model:
    """A layer, a normalization of what it writes, and another layer; all hidden channels are there twice."""
    rng = np.random.default_rng(0)

    def twice(*shape: int) -> Array:
        array = rng.normal(size=shape)
        return np.concatenate([array, array], axis=-1).astype(np.float32)

    body = f"a = MatMul(x, up)\n{between}\n{NORMS[norm]}\nt = Tanh(n)\n{rest}"
    weights = {
        "up": twice(6, HALF),
        "beside": twice(6, HALF),
        "gain": 1 + twice(HALF) / 4,
        "shift": twice(HALF),
        "down": rng.normal(size=(2 * HALF, 5)).astype(np.float32),
        "two": np.array(2, np.float32),
        "epsilon": np.array(1e-3, np.float32),
    }
    return tiny("float[N,S,6] x => float[] y", body, {k: v for k, v in weights.items() if k in body}, opset=17)


def feed_of(count: int = 64) -> dict[str, Array]:
    """Calibration data."""
    return {"x": np.random.default_rng(3).normal(size=(count, 5, 6)).astype(np.float32)}


@pytest.mark.parametrize("between", ["h = Relu(a)", GATED])
@pytest.mark.parametrize("norm", NORMS)
def test_channels_that_are_there_twice_go_without_loss(norm: str, between: str) -> None:
    model, data = normalized(norm, between=between), feed_of()
    result = onnxgrail.compress(model, data=data, unit_ratio=0.5, round_to=1)
    (block,) = result.report.data["blocks"]
    assert block["kept"] == HALF
    assert not any(name.startswith("onnxgrail.") for node in result.model.graph for name in node.metadata_props)
    want, got = run(model, data)["y"], run(result.model, data)["y"]
    assert np.square(got - want).sum() < 1e-5 * np.square(want).sum()


MAPS = {
    "mean and variance": "m = ReduceMean<axes=[1, 2]>(h)\nd = Sub(h, m)\nq = Mul(d, d)\n"
    "v = ReduceMean<axes=[1, 2]>(q)\ne = Add(v, epsilon)\nr = Sqrt(e)\nu = Div(d, r)\ns = Mul(u, gain)\n"
    "n = Add(s, shift)",
    "instance": "f = Reshape(h, flat)\ni = InstanceNormalization<epsilon=0.001>(f, one, zero)\nz = Shape(h)\n"
    "b = Reshape(i, z)\ns = Mul(b, gain)\nn = Add(s, shift)",
    "group": "g = Reshape(gain, all)\nk = Reshape(shift, all)\n"
    "n = GroupNormalization<num_groups=1, epsilon=0.001>(h, g, k)",
}


@pytest.mark.parametrize("norm", MAPS)
def test_norms_of_all_channels_and_positions_too(norm: str) -> None:
    rng = np.random.default_rng(0)

    def twice(*shape: int) -> Array:
        array = rng.normal(size=shape)
        return np.concatenate([array, array]).astype(np.float32)

    body = f"a = Conv(x, up)\nh = Relu(a)\n{MAPS[norm]}\nt = Tanh(n)\ny = Conv(t, down)"
    weights = {
        "up": twice(HALF, 6, 1),
        "gain": 1 + twice(HALF, 1) / 4,
        "shift": twice(HALF, 1),
        "down": rng.normal(size=(5, 2 * HALF, 1)).astype(np.float32),
        "epsilon": np.array(1e-3, np.float32),
        "flat": np.array([0, 1, -1]),
        "all": np.array([-1]),
        "one": np.ones(1, np.float32),
        "zero": np.zeros(1, np.float32),
    }
    used = {name: array for name, array in weights.items() if name in re.findall(r"\w+", body)}
    model = tiny("float[N,6,T] x => float[] y", body, used, opset=21 if norm == "group" else 17)
    data = {"x": rng.normal(size=(64, 6, 5)).astype(np.float32)}
    result = onnxgrail.compress(model, data=data, unit_ratio=0.5, round_to=1)
    assert [block["kept"] for block in result.report.data["blocks"]] == [HALF]
    want, got = run(model, data)["y"], run(result.model, data)["y"]
    assert np.square(got - want).sum() < 1e-5 * np.square(want).sum()


def naive(x: Array, stays: Bools, norm: str) -> Array:
    """The output if only these hidden channels are there."""
    weights = {name: value.const_value.numpy() for name, value in normalized(norm).graph.initializers.items()}  # type: ignore[union-attr]
    h = np.maximum(x @ weights["up"][:, stays], 0)
    d = h - h.mean(-1, keepdims=True) if norm.startswith("layer") else h
    epsilon = 1e-5 if norm == "layer without shift" else 1e-3
    u = d / np.sqrt(np.square(d).mean(-1, keepdims=True) + epsilon) * weights["gain"][stays]
    t = np.tanh(u + weights["shift"][stays] if "shift" in weights else u)
    return np.asarray(t @ weights["down"][stays])


@pytest.mark.parametrize("norm", NORMS)
def test_the_model_of_full_width_leaves_out_dead_channels(norm: str) -> None:
    model, feed = normalized(norm), feed_of(3)
    marked, survey = traced(model, observe(model, feed), Lacks())
    (block,) = survey.blocks
    stays = np.random.default_rng(1).random(2 * HALF) < 0.6
    dead = np.zeros(int(block.ids.max()) + 1, bool)
    dead[block.ids[~stays]] = True
    leave_out(marked, survey, dead)
    down = marked.graph.initializers["down"]
    assert down.const_value is not None
    down.const_value = ir.tensor(down.const_value.numpy() * stays[:, None].astype(np.float32), name="down")
    np.testing.assert_allclose(run(marked, feed)["y"], naive(feed["x"], stays, norm), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, "--data"),
        ({"compensate": "grail"}, "--compensate best"),
        ({"compensate": "none"}, "--compensate best"),
        ({"reducer": "fold"}, "--reducer prune"),
    ],
)
def test_without_fits_the_width_stays_and_the_reason_names_the_option(options: dict[str, Any], needs: str) -> None:
    data = feed_of() if options else None
    with pytest.raises(NothingToCompressError, match=f"it is narrowed with {needs} only"):
        onnxgrail.compress(normalized("layer"), data=data, ratio=0.5, **options)


def test_inspect_shows_what_data_allow() -> None:
    assert [block["units"] for block in onnxgrail.inspect(normalized("layer")).blocks] == [2 * HALF]


@pytest.mark.parametrize(
    ("between", "rest"),
    [
        ("h = Relu(a)", "p = ReduceMean<axes=[-1]>(h)\nw = MatMul(t, down)\ny = Add(w, p)"),  # something else reads it
        ("b = MatMul(x, beside)\nh = Add(a, b)", "y = MatMul(t, down)"),  # a sum, as in a residual stream
    ],
)
def test_norms_of_other_channels_keep_them(between: str, rest: str) -> None:
    model = normalized("layer", between=between, rest=rest)
    facts = observe(model, feed_of(3))
    assert not hidden_norms(model, facts, norms_of(model, facts))


def test_half_floats_keep_their_norms() -> None:
    model = tiny(
        "float16[N,6] x => float16[] y",
        "h = MatMul(x, up)\nn = LayerNormalization(h, gain)\nt = Tanh(n)\ny = MatMul(t, down)",
        {name: np.ones(shape, np.float16) for name, shape in {"up": (6, 8), "gain": (8,), "down": (8, 5)}.items()},
        opset=17,
    )
    facts = observe(model, {"x": np.ones((2, 6), np.float16)})
    assert not hidden_norms(model, facts, norms_of(model, facts))
