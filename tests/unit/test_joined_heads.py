"""Static 8 bits where scores and boxes are joined, and only the boxes pass another layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxgrail.calibration.quantize.eight import Source, by_tool
from onnxgrail.calibration.quantize.noise import last_values
from onnxgrail.calibration.quantize.prepare import prepare
from onnxgrail.calibration.runtime.session import open_session
from onnxgrail.core import Array, Feed
from onnxgrail.graph.io.model_file import load, save
from tests.tiny import tiny

RNG = np.random.default_rng(3)
BODY = """
    a = Conv<pads = [1, 1, 1, 1]>(x, w0, b0)
    f = Relu(a)
    box = Conv(f, wb)
    cls = Conv(f, wc)
    both = Concat<axis = 1>(box, cls)
    flat = Reshape(both, shape)
    logits, scores = Split<axis = 1>(flat, parts)
    sides = Softmax<axis = 1>(logits)
    spread = Reshape(sides, square)
    d = Conv(spread, wd)
    boxes = Reshape(d, line)
    p = Sigmoid(scores)
    y = Concat<axis = 1>(boxes, p)
"""
SIGNATURE = "float[N,3,8,8] x => float[N,6,64] y"


@pytest.fixture
def source(tmp_path: Path) -> Source:
    numbers = {
        "w0": RNG.normal(size=(8, 3, 3, 3)) / 5,
        "b0": RNG.normal(size=8),
        "wb": 20 * RNG.normal(size=(16, 8, 1, 1)),
        "wc": RNG.normal(size=(2, 8, 1, 1)) / 2,
        "wd": RNG.normal(size=(4, 16, 1, 1)),
    }
    sizes = {"shape": (0, 18, 64), "parts": (16, 2), "square": (0, 16, 8, 8), "line": (0, 4, 64)}
    constants = {name: np.asarray(array, np.float32) for name, array in numbers.items()}
    constants |= {name: np.array(size, np.int64) for name, size in sizes.items()}
    save(tiny(SIGNATURE, BODY, constants), tmp_path / "m.onnx")
    prepare(tmp_path / "m.onnx", tmp_path / "ready.onnx")
    return Source(tmp_path / "ready.onnx", load((tmp_path / "ready.onnx").read_bytes()), {}, {})


def run(path: Path, feed: Feed) -> Array:
    with open_session(path) as session:
        return np.asarray(session.run(feed)["y"])


def test_what_reaches_an_output_without_a_layer_stays_in_float(source: Source) -> None:
    assert [node.op_type for node in source.between()] == ["Reshape"]  # of what only the second layer of boxes reads
    assert {"d", "both"} <= {value.name for value in last_values(source.ready, ("Conv",))}


def test_scores_have_a_range_of_their_own(source: Source) -> None:
    feed, target = {"x": RNG.normal(size=(64, 3, 8, 8)).astype(np.float32)}, source.path.with_name("q.onnx")
    by_tool(source, [feed], target, between=[node.name or "" for node in source.between()])
    wanted, found = (run(one, feed)[:, 4:] for one in (source.path, target))
    assert np.abs(found - wanted).max() < 0.03


def test_sizes_do_not_depend_on_values() -> None:
    body = "a = Conv(x, w0)\n r = Relu(a)\n b = Conv(r, w1)\n s = Shape(r)\n n = Slice(s, zero, two)\n"
    body += " rest = Concat<axis = 0>(n, minus)\n y = Reshape(b, rest)"
    shapes = {"w0": (8, 3, 1, 1), "w1": (4, 8, 1, 1)}
    numbers = {"zero": 0, "two": 1, "minus": -1}
    constants = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    constants |= {name: np.array([number], np.int64) for name, number in numbers.items()}
    model = tiny("float[N,3,8,8] x => float[N,256] y", body, constants)
    names = {value.name for value in last_values(model, ("Conv",))}
    assert "b" in names
    assert "r" not in names
