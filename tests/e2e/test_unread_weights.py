"""Weights that nothing reads are left out of the result, and no run fails because of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

import onnxgrail
from tests.tiny import tiny

HIDDEN = 256
BODY = """
a = MatMul(x, w)
b = Relu(a)
y = MatMul(b, v)
"""


def written(folder: Path, unread: int) -> Path:
    """Write a model with `unread` weights that no node reads, the first of them so large that it is passed apart."""
    weights = {"w": (16, HIDDEN), "v": (HIDDEN, 4)}
    weights |= {f"unread{number}": (300, 400) if number == 0 else (5,) for number in range(unread)}
    path = folder / "model.onnx"
    ir.save(tiny("float[N,16] x => float[N,4] y", BODY, weights), path)
    return path


def test_it_is_left_out_and_named(tmp_path: Path) -> None:
    path, x = written(tmp_path, 2), np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32)
    result = onnxgrail.compress(path, tmp_path / "small.onnx", ratio=0.2, data=x)
    assert not any(one.name.startswith("unread") for one in onnx.load(tmp_path / "small.onnx").graph.initializer)
    assert "2 weights are left out, since nothing reads them (120,005 parameters)" in result.report.data["notes"]
    assert result.report.data["model"]["params_before"] == 20 * HIDDEN
    assert result.report.data["model"]["bytes_before"] == path.stat().st_size


def test_the_numbers_are_those_without_it(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32)
    found = []
    for unread in (0, 2):
        folder = tmp_path / str(unread)
        folder.mkdir()
        onnxgrail.compress(written(folder, unread), folder / "small.onnx", max_loss=0.05, data=x)
        found.append(ort.InferenceSession(folder / "small.onnx").run(None, {"x": x})[0])
    assert np.array_equal(*found)


def test_inspect_predicts_sizes_without_it(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain, more = (onnxgrail.inspect(written(*one)) for one in ((tmp_path / "plain", 0), (tmp_path, 1)))
    assert "1 weight is left out, since nothing reads them (120,000 parameters)" in more.notes
    for one, other in zip(plain.predicted, more.predicted, strict=True):
        assert abs(one["bytes"] - other["bytes"]) < 100


def test_a_model_with_it_is_compared(tmp_path: Path) -> None:
    model = ir.load(written(tmp_path, 1))
    assert onnxgrail.compare(model, model, data=np.zeros((8, 16), np.float32)).outputs[0].cosine == 1
