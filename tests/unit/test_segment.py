"""A piece of a graph computes what the whole computes."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.calibration.observe import observe
from onnxgrail.graph.cuts.live import lives
from onnxgrail.graph.cuts.segment import cut
from onnxgrail.graph.io.serial import to_bytes
from tests.oracle import run
from tests.tiny import cnn, feed, ints, mlp, scalar, tiny


@pytest.mark.parametrize("model", [mlp(3), cnn()], ids=["mlp", "cnn"])
def test_pieces_between_cuts_compose_to_the_whole(model: ir.Model) -> None:
    arrays = feed(model)
    facts = observe(model, arrays)
    found = lives(model, facts, [1] * len(model.graph))
    nodes = list(model.graph)
    edges = [0, len(nodes) // 3, 2 * len(nodes) // 3]
    known = dict(arrays)
    for start, stop in itertools.pairwise(edges):
        piece = cut(model, found.at(start), found.at(stop), facts)
        assert len(list(piece.graph)) <= stop - start
        known = {**arrays, **run(to_bytes(piece), {n: known[n] for n in found.at(start)})}
    last = cut(model, found.at(edges[-1]), ["y"], facts)
    got = run(to_bytes(last), {n: known[n] for n in found.at(edges[-1])})
    assert np.array_equal(got["y"], run(model, arrays)["y"])


def test_a_piece_takes_other_batches() -> None:
    model = mlp(2)
    facts = observe(model, feed(model))
    piece = cut(model, ["x1"], ["y"], facts)
    assert [v.name for v in piece.graph.inputs] == ["x1"]
    assert run(to_bytes(piece), {"x1": np.ones((9, 6), np.float32)})["y"].shape == (9, 4)


def test_one_output_of_a_node_is_given_and_another_is_needed() -> None:
    model = tiny(
        "float[N,4] x => float[N,2] y",
        """
        a, b = Split<axis=1, num_outputs=2>(x)
        c = Neg(a)
        y = Add(c, b)
        """,
        {},
    )
    piece = cut(model, ["x", "b"], ["y"], observe(model, feed(model)))
    assert [value.name for value in piece.graph.inputs] == ["x"]
    arrays = {"x": np.arange(12, dtype=np.float32).reshape(3, 4)}
    assert (run(to_bytes(piece), arrays)["y"] == 2).all()


def test_the_whole_is_not_changed() -> None:
    model = mlp(2)
    before = ir.to_proto(model).SerializeToString()
    cut(model, ["x1"], ["x2"], observe(model, feed(model)))
    assert ir.to_proto(model).SerializeToString() == before


def test_inputs_that_do_not_determine_the_outputs() -> None:
    model = mlp(2)
    with pytest.raises(ValueError):  # noqa: PT011  the message is onnx_ir's
        cut(model, ["r1"], ["y"], observe(model, feed(model)))


def test_a_target_shape_that_is_an_input_of_a_piece_keeps_its_length() -> None:
    """The runtime refuses a Resize whose sizes might be of any number."""
    model = tiny(
        "float[N,3,4,4] x => float[] y",
        "h = Conv(x, w)\ns = Shape(x)\nb = Slice(s, zero, one)\nsizes = Concat<axis=0>(b, rest)\nr = Relu(h)\n"
        "y = Resize(r, , , sizes)",
        {"w": (8, 3, 1, 1), "zero": ints(0), "one": ints(1), "rest": ints(8, 6, 6)},
        recorded=False,
    )
    arrays = feed(model)
    facts = observe(model, arrays)
    piece = cut(model, ["r", "sizes"], ["y"], facts)
    values = {"r": np.zeros(facts.shapes["r"], np.float32), "sizes": facts.values["sizes"]}
    assert run(to_bytes(piece), values)["y"].shape == (3, 8, 6, 6)


def test_a_number_of_hits_is_not_declared() -> None:
    text = "p = Greater(x, zero)\nn = NonZero(p)\ni = Reshape(n, flat)\na = Gather(x, i)\ny = Relu(a)"
    model = tiny("float[6] x => float[] y", text, {"zero": scalar(0), "flat": ints(-1)}, recorded=False)
    facts = observe(model, {"x": np.array([1, -1, 1, -1, 1, -1], dtype=np.float32)})
    piece = cut(model, ["i", "x"], ["y"], facts)
    other = {"x": np.arange(6, dtype=np.float32), "i": np.arange(1, 6)}
    np.testing.assert_array_equal(run(piece, other)["y"], np.arange(1, 6))


def test_lengths_per_sample_are_not_taken_for_a_target_shape() -> None:
    """One whole number per sample has a known value in the probe run, and other batches have other sizes."""
    model = tiny(
        "float[N,4] x, int64[N] lengths => float[N,4] y",
        "r = Relu(x)\nd = Cast<to=1>(lengths)\nu = Unsqueeze(d, one)\ny = Mul(r, u)",
        {"one": ints(1)},
    )
    facts = observe(model, {"x": np.ones((2, 4), np.float32), "lengths": np.array([3, 4])})
    piece = cut(model, ["r", "lengths"], ["y"], facts)
    given = {"r": np.ones((5, 4), np.float32), "lengths": np.arange(5)}
    assert run(to_bytes(piece), given)["y"].sum() == 40
