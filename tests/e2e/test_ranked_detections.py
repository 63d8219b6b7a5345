"""A detector that lists its best results: what is listed in another order is not lost."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.calibration import both
from tests.tiny import ints, tiny

QUERIES, BEST, HIDDEN = 12, 8, 32


def detector() -> ir.Model:
    """Scores that are near each other, and boxes; the best ones are chosen in the graph."""
    rng = np.random.default_rng(1)
    shapes = {
        "w": (6, HIDDEN),
        "s": rng.normal(size=(HIDDEN, QUERIES)).astype(np.float32) / 10,
        "more": np.linspace(2, -4, QUERIES).astype(np.float32),
        "p": rng.normal(size=(HIDDEN, QUERIES * 2)).astype(np.float32) / 100,
        "at": np.stack([np.arange(QUERIES)] * 2, 1).astype(np.float32),
        "size": np.full((QUERIES, 2), 0.9, np.float32),
        "best": ints(BEST),
        "last": ints(-1),
        "apart": ints(-1, QUERIES, 2),
        "four": ints(1, 1, 4),
    }
    body = """
        a = MatMul(x, w)
        h = Relu(a)
        g = MatMul(h, s)
        l = Add(g, more)
        c = Sigmoid(l)
        d = MatMul(h, p)
        r = Reshape(d, apart)
        low = Add(r, at)
        high = Add(low, size)
        b = Concat <axis=2> (low, high)
        scores, i = TopK(c, best)
        j = Unsqueeze(i, last)
        k = Expand(j, four)
        boxes = GatherElements <axis=1> (b, k)"""
    return tiny("float[N,6] x => float[] boxes, float[] scores", body, shapes)


def removed(data: dict[str, np.ndarray]) -> float:
    try:
        result = onnxgrail.compress(detector(), data=data, max_loss=0.02, minimize="params", round_to=1)
    except onnxgrail.NothingToCompressError:
        return 0.0
    return float(result.report.data["model"]["achieved_ratio"])


def test_more_goes_than_if_rows_were_compared_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"x": np.random.default_rng(4).normal(size=(160, 6)).astype(np.float32)}
    found = removed(data)
    monkeypatch.setattr(both, "aligned", lambda _, got: got)
    assert found > 0.1
    assert removed(data) < found / 2
