"""Models that compute how long their output is, as a voice does from the durations of sounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.core import Array
from onnxgrail.graph.io.model_file import save
from onnxgrail.graph.trace.lengths import DECIDES
from tests.tiny import tiny

BODY = """
    e = Gather(table, ids)
    a = MatMul(e, w1)
    b = Relu(a)
    c = MatMul(b, w2)
    h = Add(e, c)
    d = MatMul(h, wd1)
    f = Relu(d)
    g = MatMul(f, wd2)
    i = Exp(g)
    j = Ceil(i)
    durations = Squeeze(j, last)
    ends = CumSum(durations, one)
    begins = Sub(ends, durations)
    total = ReduceSum<keepdims = 0>(durations)
    length = Cast<to = 7>(total)
    steps = Range(start, length, one)
    floats = Cast<to = 1>(steps)
    column = Unsqueeze(floats, last)
    early = Less(column, ends)
    late = GreaterOrEqual(column, begins)
    path = And(early, late)
    picks = Cast<to = 1>(path)
    flat = Squeeze(h, first)
    long = MatMul(picks, flat)
    batch = Unsqueeze(long, first)
    turned = Transpose<perm = [0, 2, 1]>(batch)
    k = Conv<pads = [2, 2]>(turned, v1)
    l = LeakyRelu(k)
    m = Conv<pads = [2, 2]>(l, v2)
    n = LeakyRelu(m)
    y = Conv<pads = [2, 2]>(n, v3)
"""
WEIGHTS: dict[str, Any] = {
    "table": (40, 32), "w1": (32, 96), "w2": (96, 32), "wd1": (32, 48), "wd2": (48, 1), "v1": (64, 32, 5),
    "v2": (64, 64, 5), "v3": (1, 64, 5), "last": np.array([-1]), "first": np.array([0]), "one": np.array(1),
    "start": np.array(0),
}  # fmt: skip


def voice(seed: int = 0) -> ir.Model:
    return tiny("int64[1,L] ids => float[1,1,T] y", BODY, WEIGHTS, seed=seed, recorded=False)


def feed(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {"ids": rng.integers(0, 40, (1, int(rng.integers(12, 40))))}


def run(path: Path, inputs: dict[str, Array]) -> Array:
    with open_session(path) as session:
        return session.run(inputs)["y"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("voices")
    for number in range(24):
        np.savez(folder / f"{number:02}.npz", **feed(number))
    return folder


@pytest.mark.parametrize("amount", [{"ratio": 0.4}, {"ratio": 0.4, "compensate": "grail"}, {"max_loss": 0.1}])
def test_what_decides_a_length_stays(amount: dict[str, Any], data: Path, tmp_path: Path) -> None:
    before, after = tmp_path / "voice.onnx", tmp_path / "small.onnx"
    save(voice(), before)
    report = onnxgrail.compress(before, after, data=data, minimize="params", **amount).report.data
    assert "mlp" not in {block["kind"] for block in report["blocks"]}
    assert DECIDES in {one["reason"] for one in report["refusals"]}
    feeds = [feed(100 + number) for number in range(8)]
    for one in feeds:
        assert run(before, one).shape == run(after, one).shape
    assert onnxgrail.compare(before, after, data=feeds).outputs[0].nmse < 0.2


def test_results_of_other_lengths_are_compared(data: Path, tmp_path: Path) -> None:
    """All weights in 4 bits move durations: the shorter result counts as followed by zeros."""
    before, after = tmp_path / "voice.onnx", tmp_path / "small.onnx"
    save(voice(), before)
    onnxgrail.compress(before, after, data=data, ratio=0.0, quantize="int4")
    assert any(run(before, feed(n)).shape != run(after, feed(n)).shape for n in range(24))
    assert 0.01 < onnxgrail.compare(before, after, data=data).outputs[0].nmse < 2


def test_a_length_that_no_layer_reads_decides_nothing() -> None:
    """Pruning may then change the number of rows, as it does after non-maximum suppression."""
    body = """
        a = MatMul(x, w1)
        b = Relu(a)
        c = MatMul(b, w2)
        s = ReduceMean<keepdims = 0>(c)
        i = Cast<to = 7>(s)
        y = Range(start, i, one)
        z = Identity(c)"""
    weights: dict[str, Any] = {"w1": (8, 16), "w2": (16, 4), "start": np.array(-9), "one": np.array(1)}
    model = tiny("float[N,8] x => int64[K] y, float[N,4] z", body, weights, recorded=False)
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
    report = onnxgrail.compress(model, data={"x": x}, ratio=0.3).report.data
    assert [block["kind"] for block in report["blocks"]] == ["mlp"]
