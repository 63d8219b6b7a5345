"""Models that draw random numbers, as a VAE does, are narrowed and compared on the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnxgrail
from onnxgrail.core import Array
from onnxgrail.graph.io.model_file import save
from tests.tiny import tiny

BODY = """
    a = MatMul(x, w1)
    b = Add(a, b1)
    c = Relu(b)
    mean = MatMul(c, wm)
    spread = MatMul(c, ws)
    size = Exp(spread)
    noise = RandomNormalLike(mean)
    away = Mul(noise, size)
    z = Add(mean, away)
    d = MatMul(z, w2)
    e = Add(d, b2)
    f = Relu(e)
    y = MatMul(f, w3)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vae") / "vae.onnx"
    rng = np.random.default_rng(3)
    shapes = {"w1": (64, 128), "b1": (128,), "wm": (128, 16), "ws": (128, 16), "w2": (16, 128), "b2": (128,)}
    shapes["w3"] = (128, 64)
    weights = {name: rng.normal(size=shape).astype(np.float32) / shape[0] ** 0.5 for name, shape in shapes.items()}
    save(tiny("float[N,64] x => float[N,64] y", BODY, weights | {"ws": 0.1 * weights["ws"]}), path)
    return path


@pytest.fixture(scope="module")
def data() -> Array:
    rng = np.random.default_rng(0)
    return (rng.normal(size=(256, 16)) @ rng.normal(size=(16, 64)) / 4).astype(np.float32)


def test_a_model_with_random_numbers_is_narrowed_within_a_loss(model: Path, data: Array, tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    report = onnxgrail.compress(model, out, data=data, max_loss="2%", minimize="params").report.data
    search = report["allocation"]["search"]
    chosen = search["tried"][search["chosen"]]
    assert chosen["loss"]["bound"] <= 0.02
    assert chosen["cost"] < 0.9 * search["before"]
    assert any("RandomNormalLike" in note for note in report["notes"])
    assert b"RandomNormalLike" in out.read_bytes()


def test_a_model_with_random_numbers_equals_itself(model: Path, data: Array) -> None:
    found = onnxgrail.compare(model, model, data=data)
    assert found.outputs[0].max_abs == 0


POLICY = """
    a = MatMul(x, w1)
    b = Add(a, b1)
    c = Relu(b)
    d = MatMul(c, w2)
    e = Add(d, b2)
    f = Relu(e)
    chances = MatMul(f, w3)
    action = Multinomial<sample_size = 1, dtype = 7>(chances)
    mean = MatMul(f, wm)
    noise = RandomNormalLike<dtype = 1>(mean)
    force = Add(mean, noise)
"""


def test_a_policy_that_samples_its_actions_is_narrowed(data: Array, tmp_path: Path) -> None:
    """Unity's ML-Agents exports such policies with opset 9."""
    weights = {"w1": (64, 128), "b1": (128,), "w2": (128, 128), "b2": (128,), "w3": (128, 5), "wm": (128, 2)}
    save(tiny("float[N,64] x => int64[N,1] action, float[N,2] force", POLICY, weights, opset=9), tmp_path / "m.onnx")
    out = tmp_path / "out.onnx"
    report = onnxgrail.compress(tmp_path / "m.onnx", out, data=data, max_loss="5%", minimize="params").report.data
    assert report["model"]["params_after"] < 0.85 * report["model"]["params_before"]
    assert any(note.startswith("Multinomial and RandomNormalLike drew the same numbers") for note in report["notes"])
    action, force = onnxgrail.compare(tmp_path / "m.onnx", tmp_path / "m.onnx", data=data).outputs
    assert (action.agreement, force.nmse) == (1, 0)
