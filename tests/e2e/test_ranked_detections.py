"""Detectors that list their results: what is listed in another order is not lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration import both
from onnxgrail.core import Array
from onnxgrail.errors import NothingToCompressError
from tests.tiny import ints, tiny

QUERIES, BEST, HIDDEN = 12, 8, 32
BOXES = """
        d = MatMul(h, p)
        r = Reshape(d, apart)
        low = Add(r, at)
        high = Add(low, size)
        b = Concat <axis=2> (low, high)"""


def scored(columns: int, spread: float) -> dict[str, Array]:
    """Weights of scores, and of boxes that hardly move and are apart from each other."""
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(HIDDEN, columns)).astype(np.float32) / spread
    moves = rng.normal(size=(HIDDEN, QUERIES * 2)).astype(np.float32) / 100
    at, size = np.stack([np.arange(QUERIES)] * 2, 1).astype(np.float32), np.full((QUERIES, 2), 0.9, np.float32)
    return {"s": scores, "p": moves, "at": at, "size": size, "last": ints(-1)}


def detector() -> ir.Model:
    """Scores that are near each other, and boxes; the best ones are chosen in the graph."""
    shapes = {
        "w": (6, HIDDEN),
        **scored(QUERIES, 10),
        "more": np.linspace(2, -4, QUERIES).astype(np.float32),
        "best": ints(BEST),
        "apart": ints(-1, QUERIES, 2),
        "four": ints(1, 1, 4),
    }
    body = f"""
        a = MatMul(x, w)
        h = Relu(a)
        g = MatMul(h, s)
        l = Add(g, more)
        c = Sigmoid(l)
        {BOXES}
        scores, i = TopK(c, best)
        j = Unsqueeze(i, last)
        k = Expand(j, four)
        boxes = GatherElements <axis=1> (b, k)"""
    return tiny("float[N,6] x => float[] boxes, float[] scores", body, shapes)


def suppressing() -> ir.Model:
    """Boxes and scores of two classes, of which the graph lists what suppression leaves, one class after the other."""
    shapes = {
        "w": (6, HIDDEN),
        **scored(QUERIES * 2, 4),
        "most": ints(QUERIES),
        "overlap": np.array([0.5], np.float32),
        "least": np.array([0.4], np.float32),
        "apart": ints(1, QUERIES, 2),
        "classes": ints(1, 2, QUERIES),
        "flat": ints(QUERIES, 4),
        "one": ints(1),
        "two": ints(2),
    }
    body = f"""
        a = MatMul(x, w)
        h = Relu(a)
        g = MatMul(h, s)
        l = Sigmoid(g)
        c = Reshape(l, classes)
        {BOXES}
        k = NonMaxSuppression(b, c, most, overlap, least)
        scores = GatherND(c, k)
        m = Gather <axis=1> (k, one)
        labels = Reshape(m, last)
        n = Gather <axis=1> (k, two)
        o = Reshape(n, last)
        f = Reshape(b, flat)
        boxes = Gather <axis=0> (f, o)"""
    return tiny("float[1,6] x => float[K,4] boxes, float[K] scores, int64[K] labels", body, shapes)


def removed(model: ir.Model, data: dict[str, Array]) -> float:
    """The share of the parameters that goes within 4 %; 0 if nothing can go."""
    try:
        result = onnxgrail.compress(model, data=data, max_loss=0.04, minimize="params", round_to=1)
    except NothingToCompressError:
        return 0.0
    return float(result.report.data["model"]["achieved_ratio"])


@pytest.mark.parametrize("make", [detector, suppressing])
def test_more_goes_than_if_rows_were_compared_as_they_are(
    make: Callable[[], ir.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"x": np.random.default_rng(4).normal(size=(160, 6)).astype(np.float32)}
    found = removed(make(), data)
    monkeypatch.setattr(both, "aligned", lambda _, got, __: got)
    assert found > 0.1
    assert removed(make(), data) < found / 2
