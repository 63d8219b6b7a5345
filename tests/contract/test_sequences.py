"""Pieces of a split that an export keeps in a sequence: followed like those of Split, or refused by name."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnxgrail.graph.io.model_file import load
from tests.oracle import check_same, narrowed_equals_masked, run
from tests.tiny import feed, ints, tiny

PIECES = """
    h = MatMul(x, u)
    $s
    a = SequenceAt(s, zero)
    b = SequenceAt(s, last)
    t = Tanh(a)
    z = Mul(t, b)
    y = MatMul(z, w)"""
WEIGHTS = {"u": (6, 8), "w": (4, 5), "zero": np.array(0), "last": np.array(-1)}
EQUAL = "s = SplitToSequence<axis=-1>(h, size)"


def pieces(split: str = EQUAL, body: str = PIECES, opset: int = 20, **weights: object) -> ir.Model:
    """A gate whose two halves come out of a sequence."""
    known = {"size": np.array(4), **WEIGHTS, **weights}
    return tiny(
        "float[N,6] x => float[] y", body.replace("$s", split), known, opset=opset, ir_version=10 if opset > 12 else 7
    )


@pytest.mark.parametrize("opset", [20, 12])
@pytest.mark.parametrize("size", [np.array(4), ints(4, 4)], ids=["chunks", "sizes"])
def test_a_split_in_a_sequence_is_a_split(size: np.ndarray, opset: int) -> None:
    source = pieces(size=size, opset=opset)
    model = load(source)
    assert [n.op_type for n in model.graph] == ["MatMul", "Split", "Tanh", "Mul", "MatMul"]
    assert not {"zero", "last", "size"} & set(model.graph.initializers)
    assert "SplitToSequence" in [n.op_type for n in source.graph]  # the caller's model stays
    assert {v.name for v in model.graph.node("Tanh_4").inputs if v is not None} == {"a"}
    check_same(run(model, feed(source)), run(source, feed(source)))
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert [(s.initializer, s.index.shape) for s in block.slots] == [("u", (4, 2)), ("w", (4, 1))]


def test_constants_in_nodes() -> None:
    body = PIECES.replace("$s", "n = Constant<value = int64 {4}>()\n$s")
    model = load(pieces("s = SplitToSequence<axis=-1>(h, n)", body))
    assert [n.op_type for n in model.graph] == ["MatMul", "Split", "Tanh", "Mul", "MatMul"]
    assert len(narrowed_equals_masked(model, feed(model)).blocks) == 1


def test_pieces_nobody_reads_and_pieces_read_twice() -> None:
    """The last chunk is smaller."""
    body = PIECES.replace("last", "zero").replace("w)", "w3)")
    source = pieces(body=body, size=np.array(3), w3=(3, 5))
    model = load(source)
    assert [n.op_type for n in model.graph] == ["MatMul", "Split", "Identity", "Tanh", "Mul", "MatMul"]
    check_same(run(model, feed(source)), run(source, feed(source)))
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert block.units == 3


def test_a_piece_that_leaves_the_model() -> None:
    source = pieces()
    source.graph.outputs.append(next(v for n in source.graph for v in n.outputs if v.name == "a"))
    model = load(source)
    assert [v.name for v in model.graph.outputs] == ["y", "a"]
    check_same(run(model, feed(source)), run(source, feed(source)))


@pytest.mark.parametrize(
    ("split", "extra"),
    [
        ("s = SplitToSequence<axis=-1, keepdims=1>(h)", ""),
        ("s = SplitToSequence<axis=-1>(h, size)", "\nl = SequenceLength(s)\nc = Cast<to=1>(l)\ny = Mul(y0, c)"),
        ("r = Relu(h)\nd = Shape<start=1>(r)\ne = Squeeze(d)\nk = Div(e, two)\ns = SplitToSequence<axis=-1>(h, k)", ""),
    ],
    ids=["one-by-one", "other-reader", "computed"],
)
def test_other_sequences_stay(split: str, extra: str) -> None:
    body = PIECES.replace("y =", "y0 =") + extra if extra else PIECES
    wide = (1, 5) if "keepdims" in split else (4, 5)
    source = pieces(split, body, w=wide, two=np.array(2))
    model = load(source)
    assert [n.op_type for n in model.graph] == [n.op_type for n in source.graph]
    survey = narrowed_equals_masked(model, feed(model))
    assert not survey.blocks
    assert {r.op for r in survey.refusals if r.value == "u"} == {"SplitToSequence"}
