"""Weights that are stored in another shape, from which the graph computes theirs, as tf2onnx writes `Einsum` layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnxgrail
from onnxgrail.graph.flatten.direct import direct
from onnxgrail.graph.flatten.known import compute_known
from onnxgrail.graph.io.serial import to_bytes
from onnxgrail.graph.stored.declared import LaidOut, Move
from tests.oracle import check_same, narrowed_equals_masked, run
from tests.tiny import feed, ints, tiny

HEADS, WIDTH, SAMPLES = 4, 2, 32
WEIGHTS = {"wq": (6, 8), "wk": (6, 8), "wv": (6, 8), "wo": (1, 6, HEADS, WIDTH)}
KNOWN = """
    stored = Shape(wo)
    summed = Gather(stored, axes)
    width = ReduceProd<keepdims=1>(summed)
    target = Concat<axis=0>(any, width)
    rows = Reshape(wo, target)
    columns = Transpose<perm=[1,0]>(rows)
"""
BODY = (
    KNOWN
    + """
    q = MatMul(x, wq)
    k = MatMul(x, wk)
    v = MatMul(x, wv)
    qr = Reshape(q, split)
    kr = Reshape(k, split)
    vr = Reshape(v, split)
    qt = Transpose<perm=[0,2,1,3]>(qr)
    kt = Transpose<perm=[0,2,3,1]>(kr)
    vt = Transpose<perm=[0,2,1,3]>(vr)
    scores = MatMul(qt, kt)
    p = Softmax(scores)
    z = MatMul(p, vt)
    zt = Transpose<perm=[0,2,1,3]>(z)
    zr = Reshape(zt, merged)
    y = MatMul(zr, columns)
"""
)
SHAPES = {"split": ints(0, 0, HEADS, WIDTH), "merged": ints(0, 0, 8), "axes": ints(2, 3), "any": ints(-1)}


def attention() -> ir.Model:
    """Attention with one matrix stored as (1, outputs, heads, channels)."""
    return tiny("float[N,S,6] x => float[] y", BODY, {**WEIGHTS, **SHAPES}, recorded=False)


def test_heads_and_their_channels_are_removed() -> None:
    model = attention()
    compute_known(model)
    survey = narrowed_equals_masked(model, feed(model))
    assert {(block.kind, block.units) for block in survey.blocks} == {("heads", HEADS)}


def test_the_report_names_the_stored_array() -> None:
    """So the file alone tells what is gone.  Nothing at full width stays in the result."""
    model = attention()
    data = {"x": np.random.default_rng(0).standard_normal((SAMPLES, 5, 6)).astype(np.float32)}
    result = onnxgrail.compress(
        to_bytes(model), data=data, unit_ratio=0.5, compensate="none", reducer="prune", round_to=1
    )
    (block,) = result.report.data["blocks"]
    (member,) = [member for member in block["members"] if member["role"] == "consumer"]
    assert (member["initializer"], member["axis"], len(member["kept"])) == ("wo", 2, HEADS // 2)
    slim = result.model
    assert sum(value.const_value.size for value in slim.graph.initializers.values() if value.const_value) < 4 * 48
    mask = np.zeros(HEADS, dtype=np.float32)
    mask[member["kept"]] = 1
    wo = model.graph.initializers["wo"]
    assert wo.const_value is not None
    wo.const_value = ir.tensor(wo.const_value.numpy() * mask[:, None], name="wo")
    check_same(run(slim, data), run(model, data))


def test_positions_of_several_axes_are_those_of_the_weight() -> None:
    """They are on no axis of the stored array, but on one of a flat array."""
    deep, flat, turned = (
        LaidOut("w", "stored", moves)
        for moves in (
            (Move((4, 3, 2), (4, 6), None),),
            (Move((24,), (4, 6), None),),
            (Move((3, 4, 2), (4, 3, 2), (1, 0, 2)), Move((4, 3, 2), (4, 6), None)),
        )
    )
    for found, kept, member in (
        (deep, [0, 1, 2, 4, 5], ("w", 1, [0, 1, 2, 4, 5])),
        (deep, [0, 1, 4, 5], ("stored", 1, [0, 2])),
        (turned, [0, 1, 4, 5], ("stored", 0, [0, 2])),
        (turned, range(6), ("stored", 0, [0, 1, 2])),
        (flat, [0, 3], ("stored", 0, [*range(0, 24, 6), *range(3, 24, 6)])),
    ):
        (one,) = found.members(1, np.array(kept))
        assert (one.name, one.axis, sorted(one.positions.tolist())) == (member[0], member[1], sorted(member[2]))


def test_arrays_of_which_only_the_shape_is_read_are_left_out() -> None:
    """As of queries, keys and values: tf2onnx stores their matrices twice, the second time for the shape alone."""
    body = "s = Shape<start=1>(twin)\nt = Concat<axis=0>(any, s)\nh = MatMul(x, w)\nr = Reshape(h, t)\ny = MatMul(r, v)"
    weights = {"w": (6, 8), "twin": (6, 8), "v": (8, 6), "any": ints(-1)}
    model = tiny("float[N,6] x => float[N,6] y", body, weights, recorded=False)
    data = {"x": np.random.default_rng(0).standard_normal((SAMPLES, 6)).astype(np.float32)}
    result = onnxgrail.compress(to_bytes(model), data=data, unit_ratio=0.5, round_to=1)
    assert "twin" not in result.model.graph.initializers
    assert any("1 weight is left out (48 parameters)" in note for note in result.report.data["notes"])
    assert run(result.model, data)["y"].shape == (SAMPLES, 6)


def known(body: str, **others: Any) -> ir.Model:
    """A graph after known sizes were computed."""
    model = tiny("float[N,6] x => float[] y, int64[] z", body, {"w": (6, 8), **SHAPES, **others}, recorded=False)
    compute_known(model)
    return model


def test_sizes_become_constants() -> None:
    model = known("s = Shape<start=1>(w)\nt = Mul(s, two)\ny = MatMul(x, w)\ne = Shape(x)\nz = Add(e, t)", two=ints(2))
    assert [node.op_type for node in model.graph] == ["MatMul", "Shape", "Add"]
    value = model.graph.initializers["t"].const_value
    assert value is not None
    assert value.numpy().tolist() == [16]


@pytest.mark.parametrize(
    "body",
    [
        "z = Shape(w)\ny = MatMul(x, w)",
        "s = Shape(w)\ny = MatMul(x, w)\nt = Add(s, s)\na = ReduceSum<keepdims=0>(w)\nz = Cast<to=7>(a)\nu = Abs(t)",
    ],
    ids=["an output", "two readers"],
)
def test_other_sizes_stay_computed(body: str) -> None:
    before = tiny("float[N,6] x => float[] y, int64[] z", body, {"w": (6, 8), **SHAPES}, recorded=False)
    assert [n.op_type for n in known(body).graph] == [n.op_type for n in before.graph]


def test_floats_that_are_made_of_sizes_stay_computed() -> None:
    model = known("s = Shape(w)\nf = Cast<to=1>(s)\nm = MatMul(x, w)\ny = Add(m, f)\nz = Shape(x)")
    assert "Cast" in [node.op_type for node in model.graph]


def test_a_factor_of_no_bias_is_removed() -> None:
    """With it, nothing could be added to what the layer computes; of a bias that is there, it stays."""
    body = "h = Gemm <beta = 0.0> (x, w)\nr = Relu(h)\ny = Gemm <beta = 0.5> (r, v, b)"
    model = tiny("float[N,6] x => float[N,6] y", body, {"w": (6, 8), "v": (8, 6), "b": (6,)})
    before = run(model, feed(model))
    direct(model)
    assert [node.attributes.get("beta") is None for node in model.graph if node.op_type == "Gemm"] == [True, False]
    check_same(run(model, feed(model)), before)
