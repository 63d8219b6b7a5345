"""Streams that something reads without the normalizations, and streams that begin with a normalization."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.algebra.rotation import basis_of
from tests.oracle import check_same, run
from tests.tiny import feed, ints, tiny
from tests.turned import begun, found_in, orthogonal, projected, turned, without

WIDTH, KEPT = 12, 7


def read_as_it_is(how: str) -> ir.Model:
    """Layers whose stream is read without a normalization, too, such as by the neck of SAM."""
    text, outputs = RAW[how]
    rest = f"""
        y1 = LayerNormalization(x1, g1, s0)
        z1 = LayerNormalization(x1, g0, s1)
        {text}
        h1 = MatMul(y1, head)
        h2 = MatMul(z1, head2)
        h3 = Add(h1, h2)
        y = Add(h3, z)"""
    shapes = {"table": (7, WIDTH), "up": (WIDTH, 60), "down": (60, WIDTH), "neck": (WIDTH, 3), "bias": (3,)}
    shapes |= {"head": (WIDTH, 3), "head2": (WIDTH, 3)} | dict.fromkeys(("g0", "s0", "g1", "s1"), (WIDTH,))
    return begun(rest, shapes, outputs)


RAW = {
    "by a layer": ("w = MatMul(x1, neck)\nz = Add(w, bias)", ""),
    "by a layer after a transpose": (
        "t = Transpose<perm=[0,2,1]>(x1)\nu = Transpose<perm=[0,2,1]>(t)\nz = MatMul(u, neck)",
        "",
    ),
    "by an activation between transposes": (
        "t = Transpose<perm=[0,2,1]>(x1)\nr = Relu(t)\nu = Transpose<perm=[0,2,1]>(r)\nz = MatMul(u, neck)",
        "",
    ),
    "by an activation": ("r = Relu(x1)\nz = MatMul(r, neck)", ""),
    "by the caller": ("z = MatMul(z1, neck)", f", float[N,S,{WIDTH}] x1"),
}


@pytest.mark.parametrize("first", [True, False], ids=["kept", "removed"])
@pytest.mark.parametrize("how", RAW)
def test_a_stream_that_is_read_as_it_is_carries_its_mean(how: str, *, first: bool) -> None:
    model, basis = read_as_it_is(how), np.roll(orthogonal(WIDTH), int(first), axis=1)
    other, survey = turned(model, feed(model), basis)
    check_same(run(other, feed(model)), run(model, feed(model)))
    assert sum(node.op_type == "Mul" for node in other.graph) == 2
    slim, want = without(other, survey, KEPT), projected(model, feed(model), basis[:, :KEPT])
    check_same(run(slim, feed(model)), run(want, feed(model)))


def test_the_direction_of_the_mean_comes_first() -> None:
    rows = np.random.default_rng(5).normal(size=(60, 8)) * np.arange(1, 9)
    basis = basis_of([rows.T @ rows], beside_mean=True)
    np.testing.assert_allclose(basis.T @ basis, np.eye(8), atol=1e-12)
    np.testing.assert_allclose(basis[:, 0], 8**-0.5)
    energy = np.square(rows @ basis).sum(axis=0)[1:]
    assert (np.diff(energy) < 0).all()


BEGUN = """
    t0 = Gather(table, ids)
    x0 = LayerNormalization(t0, g0, s0)
    y0 = LayerNormalization(x0, g1, s1)
    {text}
    h0 = MatMul(r0, up)
    a0 = Relu(h0)
    d0 = MatMul(a0, down)
    x1 = Add(x0, d0)
    y1 = LayerNormalization(x1, g0, s1)
    h1 = MatMul(y1, up1)
    a1 = Relu(h1)
    d1 = MatMul(a1, down1)
    x2 = Add(x1, d1)
    z = LayerNormalization(x2, g1, s0)
    y = MatMul(z, head)"""
BEGUN_SHAPES = {"table": (7, WIDTH), "head": (WIDTH, 3)} | dict.fromkeys(("g0", "s0", "g1", "s1"), (WIDTH,))
BEGUN_SHAPES |= {"up": (WIDTH, 90), "up1": (WIDTH, 90), "down": (90, WIDTH), "down1": (90, WIDTH)}


def test_what_reads_a_normalization_that_joins_a_stream_gets_a_matrix_too() -> None:
    """Swin normalizes its patches, and pads what the first layer normalizes."""
    model = tiny("int64[N,S] ids => float[] y", BEGUN.format(text="r0 = Relu(y0)"), BEGUN_SHAPES)
    basis = orthogonal(WIDTH)
    (stream,) = found_in(model, feed(model)).streams.values()
    assert len(stream.norms) == 3
    other, survey = turned(model, feed(model), basis)
    check_same(run(other, feed(model)), run(model, feed(model)))
    slim = without(other, survey, KEPT)
    check_same(run(slim, feed(model)), run(projected(model, feed(model), basis[:, :KEPT]), feed(model)))


def test_where_no_matrix_helps_what_joined_the_stream_stays_as_it_was() -> None:
    text = "t1 = Unsqueeze(y0, last)\nq0 = Softmax<axis=2>(t1)\nr0 = Squeeze(q0, last)"
    model = tiny("int64[N,S] ids => float[] y", BEGUN.format(text=text), {**BEGUN_SHAPES, "last": ints(-1)})
    found = found_in(model, feed(model))
    assert not found.streams
    (why,) = found.refusals
    assert (why.value, why.op, why.reason) == ("x1", "Softmax", "its result depends on the basis of the stream")
    assert [node.op_type for node in found.model.graph] == [node.op_type for node in model.graph]
