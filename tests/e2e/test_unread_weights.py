"""Weights that no node reads stay as they are and are named, and no run fails because of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import onnxgrail
from onnxgrail.core import Array
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


def arrays(path: Path) -> dict[str, Array]:
    return {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}


def test_it_stays_and_is_named(tmp_path: Path) -> None:
    path, small = written(tmp_path, 2), tmp_path / "small.onnx"
    x = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32)
    note = "2 weights are read by no node (120,005 parameters): --simplify leaves them out"
    assert note in onnxgrail.inspect(path).notes
    result = onnxgrail.compress(path, small, ratio=0.2, data=x)
    assert note in result.report.data["notes"]
    before, after = (arrays(one) for one in (path, small))
    assert all(np.array_equal(before[name], after[name]) for name in ("unread0", "unread1"))


def test_the_hint_holds(tmp_path: Path) -> None:
    pytest.importorskip("onnxslim")
    x = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32)
    onnxgrail.compress(written(tmp_path, 2), tmp_path / "small.onnx", ratio=0.2, data=x, simplify=True)
    assert not any(name.startswith("unread") for name in arrays(tmp_path / "small.onnx"))


def test_few_are_not_worth_a_word(tmp_path: Path) -> None:
    model = tiny("float[N,16] x => float[N,4] y", BODY, {"w": (16, HIDDEN), "v": (HIDDEN, 4), "unread": (5,)})
    assert not onnxgrail.inspect(model).notes


def test_the_other_weights_are_those_of_a_model_without_it(tmp_path: Path) -> None:
    x, found = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32), []
    for unread in (0, 2):
        folder = tmp_path / str(unread)
        folder.mkdir()
        onnxgrail.compress(written(folder, unread), folder / "small.onnx", data=x, max_loss=0.05, minimize="macs")
        found.append(ort.InferenceSession(folder / "small.onnx").run(None, {"x": x})[0])
    assert np.array_equal(*found)


def test_a_model_with_it_is_compared(tmp_path: Path) -> None:
    model = ir.load(written(tmp_path, 1))
    assert onnxgrail.compare(model, model, data=np.zeros((8, 16), np.float32)).outputs[0].cosine == 1
