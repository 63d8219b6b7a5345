"""Products of ONNX Runtime that move their operands' first axis: heads written so have channels of their own, too."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxgrail.calibration.observe import observe
from onnxgrail.graph.rotate.basis import rotatable, rotate
from onnxgrail.graph.rotate.unfused import move_before
from tests.oracle import run
from tests.tiny import feed, tiny

MS, BOTH = "com.microsoft.FusedMatMul", "transBatchA=1, transBatchB=1"
HEADS = f"""
    q = MatMul(x, wq)
    k = MatMul(x, wk)
    v = MatMul(x, wv)
    qh = Reshape(q, split)
    kh = Reshape(k, split)
    vh = Reshape(v, split)
    s = {MS}<{BOTH}, transB=1, alpha=0.35>(qh, kh)
    p = Softmax(s)
    o = {MS}<transBatchB=1>(p, vh)
    t = Transpose<perm=[1,0,2]>(o)
    u = Reshape(t, join)
    y = MatMul(u, wo)
"""  # of one sample: positions, then heads, then channels, as the multi-head attention of torch splits them


def model() -> ir.Model:
    weights = dict.fromkeys(("wq", "wk", "wv", "wo"), (32, 32))
    sizes = {"split": np.array([-1, 4, 8]), "join": np.array([-1, 32])}
    return tiny("float[S,32] x => float[] y", HEADS, {**weights, **sizes}, imports={"com.microsoft": 1})


def test_a_transpose_takes_over() -> None:
    plain, other = model(), model()
    facts = observe(other, feed(other))
    shapes = move_before(other, facts).shapes
    assert [shapes[f"{name}/moved"] for name in ("qh", "kh", "vh")] == [(4, 5, 8)] * 3
    assert not any("transBatch" in name for node in other.graph for name in node.attributes)
    arrays = feed(plain)
    np.testing.assert_allclose(run(other, arrays)["y"], run(plain, arrays)["y"], rtol=1e-5, atol=1e-5)


def test_channels_inside_heads_get_a_basis() -> None:
    plain = model()
    found = rotatable(plain, observe(plain, feed(plain)), ("qk", "vo"))
    assert sorted(inside.kind for inside in found.heads.values()) == ["qk", "vo"]
    rng = np.random.default_rng(0)
    bases = {name: np.stack([np.linalg.qr(rng.normal(size=(8, 8)))[0] for _ in range(4)]) for name in found.heads}
    arrays = feed(plain)
    np.testing.assert_allclose(run(rotate(found, bases), arrays)["y"], run(plain, arrays)["y"], rtol=1e-3, atol=1e-3)
