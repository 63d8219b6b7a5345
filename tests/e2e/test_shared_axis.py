"""Two blocks that share a consumer through Concat: the second is measured on an axis the first has already left."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import onnxgrail
from tests.tiny import tiny

WIDTHS = (10, 12)


def joined() -> onnx.ModelProto:
    weights = {"u": (6, WIDTHS[0]), "v": (6, WIDTHS[1]), "w": (sum(WIDTHS), 5)}
    text = """
        a = MatMul(x, u)
        b = Relu(a)
        c = MatMul(x, v)
        d = Relu(c)
        e = Concat<axis = -1>(b, d)
        y = MatMul(e, w)
    """
    proto: onnx.ModelProto = ir.to_proto(tiny("float[N,6] x => float[N,5] y", text, weights))
    return proto


@pytest.mark.parametrize("closed_loop", [True, False])
def test_each_block_gets_its_own_map(closed_loop: bool) -> None:
    model = joined()
    before = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
    x = np.random.default_rng(1).standard_normal((80, 6)).astype(np.float32)
    result = onnxgrail.compress(
        model,
        data={"x": x},
        held_out=0,
        unit_ratio=0.5,
        round_to=1,
        selector="l2",
        compensate="grail",
        closed_loop=closed_loop,
        ridge=1e-3,
    )
    after = {n: v.const_value.numpy() for n, v in result.model.graph.initializers.items() if v.const_value is not None}
    start, rows = 0, []
    for name, width in zip(("u", "v"), WIDTHS, strict=True):
        h = np.maximum(x.astype(np.float64) @ before[name], 0)
        keep = np.sort(np.argsort(-np.linalg.norm(before[name], axis=0), kind="stable")[: width - width // 2])
        gram = h.T @ h
        small = gram[np.ix_(keep, keep)]
        small = small + 1e-3 * np.diagonal(small).mean() * np.eye(len(keep))
        rows.append(np.linalg.solve(small, gram[keep] @ before["w"][start : start + width]))
        start += width
    assert after["w"].shape == (sum(len(r) for r in rows), 5)
    np.testing.assert_allclose(after["w"], np.concatenate(rows), rtol=1e-4, atol=1e-5)
