"""Constants that Expand, Tile or Reshape brings to computed sizes: cut like constants where they meet channels."""

from __future__ import annotations

import numpy as np
import pytest

from tests.contract.attention import HEADS, SCORES, TOKENS, WIDTH, attention
from tests.oracle import narrowed_equals_masked
from tests.tiny import Weights, feed, ints, tiny

SIZES = "n = Shape<start=0, end=1>(x)\ns = Shape<start=1, end=2>(x)\n"
SINKS: dict[str, tuple[str, Weights]] = {
    "expanded": (
        f"{SIZES}to = Concat<axis=0>(n, heads, s, one)\nse = Expand(sinks, to)",
        {"heads": ints(HEADS)},
    ),
    "tiled": (f"{SIZES}to = Concat<axis=0>(n, one, s, one)\nse = Tile(sinks, to)", {}),
    "cast": (
        f"{SIZES}to = Concat<axis=0>(n, one, s, one)\ns1 = Tile(sinks, to)\ns2 = Cast<to=11>(s1)\nse = Cast<to=1>(s2)",
        {},
    ),
}
SINK_SOFTMAX = """
as = Concat<axis=3>(a2, se)
a3 = Softmax<axis=-1>(as)
a4 = Slice(a3, i0, minus, last)
o0 = MatMul(a4, v3)
"""


@pytest.mark.parametrize("ratio", [0.25, 0.75])
@pytest.mark.parametrize("spelling", SINKS)
def test_attention_sinks_go_with_their_heads(spelling: str, ratio: float) -> None:
    """GPT-OSS: one more logit for every head, the same for all tokens."""
    text, weights = SINKS[spelling]
    model = attention(
        shapes="copied",
        scores=f"{SCORES}\n{text}",
        softmax=SINK_SOFTMAX,
        weights={
            "sinks": (1, HEADS, 1, 1),
            "one": ints(1),
            "i0": ints(0),
            "minus": ints(-1),
            "last": ints(3),
            **weights,
        },
    )
    (block,) = narrowed_equals_masked(model, feed(model), ratio).blocks
    assert (block.kind, block.units) == ("heads", HEADS)
    assert ("sinks", 1) in {(s.initializer, s.axis) for s in block.slots if s.role == "passenger"}


@pytest.mark.parametrize("join", ["z = Concat<axis=1>(token, h)", "z = Add(h, token)", "z = Mul(token, h)"])
def test_a_token_for_every_sample(join: str) -> None:
    """A class token, or an embedding of the whole image, is repeated for each sample."""
    model = tiny(
        f"float[N,{TOKENS},{WIDTH}] x => float[] y",
        f"h = MatMul(x, w)\nn = Shape<start=0, end=1>(x)\nto = Concat<axis=0>(n, rest)\ntoken = Expand(cls, to)\n"
        f"{join}\nr = Relu(z)\ny = MatMul(r, out)",
        {"w": (WIDTH, 6), "cls": (1, 1, 6), "rest": ints(1, 6), "out": (6, 4)},
    )
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert {s.initializer for s in block.slots} == {"w", "cls", "out"}


@pytest.mark.parametrize(
    ("read", "fixed"),
    [("early = ReduceMean(token, two)\ne = Mul(h, early)", "e"), ("", "token")],
    ids=["before", "as-an-output"],
)
def test_what_was_read_without_channels_keeps_them(read: str, fixed: str) -> None:
    """The node that read it first saw no channels that could go, and neither does who reads an output."""
    outputs = ", float[] token" if fixed == "token" else ""
    model = tiny(
        f"float[N,{TOKENS},{WIDTH}] x => float[] y{outputs}",
        f"h = MatMul(x, w)\nn = Shape<start=0, end=1>(x)\nto = Concat<axis=0>(n, rest)\ntoken = Expand(cls, to)\n"
        f"{read}\nz = Add({'e' if read else 'h'}, token)\nr = Relu(z)\ny = MatMul(r, out)",
        {"w": (WIDTH, 6), "cls": (1, 1, 6), "rest": ints(1, 6), "two": ints(2), "out": (6, 4)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert not survey.blocks
    assert any("cannot be narrowed" in r.reason for r in survey.refusals if r.value == "w")


@pytest.mark.parametrize(
    ("none", "cut"),
    [
        ("", True),
        ("to = Concat<axis=0>(n, rest)\nnone = Expand(nothing, to)", True),
        ("to = Concat<axis=0>(n, rest)\nnone = ConstantOfShape(to)", False),
    ],
    ids=["constant", "repeated", "filled"],
)
def test_pieces_without_elements(none: str, cut: bool) -> None:
    """DINOv3 without register tokens joins a tensor of none of them; a runtime compares the other axes."""
    rows, piece = ("N", "none") if none else (1, "nothing")
    model = tiny(
        f"float[{rows},{TOKENS},{WIDTH}] x => float[] y",
        f"h = MatMul(x, w)\nn = Shape<start=0, end=1>(x)\n{none}\nz = Concat<axis=1>({piece}, h)\nr = Relu(z)\n"
        "y = MatMul(r, out)",
        {"w": (WIDTH, 6), "nothing": np.zeros((1, 0, 6), np.float32), "rest": ints(0, 6), "out": (6, 4)},
    )
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert ("nothing" in {s.initializer for s in block.slots}) == cut


@pytest.mark.parametrize("ratio", [0.25, 0.75])
@pytest.mark.parametrize("of", ["x", "h"])
@pytest.mark.parametrize("join", ["z = Add(h, b)", "z = Mul(b, h)"])
def test_a_bias_in_the_shape_of_a_picture(join: str, of: str, ratio: float) -> None:
    """Keras with torch reshapes it with the number of channels of what it is added to, or of another tensor."""
    body = f"""
        h = Conv(x, w1)
        channels = Shape<start=1, end=2>({of})
        to = Concat<axis=0>(one, channels, one, one)
        b = Reshape(bias, to)
        {join}
        r = Relu(z)
        y = Conv(r, w2)"""
    weights = {"w1": (8, 8, 3, 3), "bias": (8,), "w2": (4, 8, 1, 1), "one": ints(1)}
    model = tiny("float[N,8,6,6] x => float[] y", body, weights)
    (block,) = narrowed_equals_masked(model, feed(model), ratio).blocks
    assert ("bias", 0) in {(s.initializer, s.axis) for s in block.slots if s.role == "passenger"}


def test_a_bias_reshaped_for_two_readers_stays() -> None:
    body = "h = Conv(x, w1)\nto = Shape<start=1, end=2>(x)\nb = Reshape(bias, to)\nz = Transpose<perm=[0,2,3,1]>(h)\n"
    model = tiny(
        "float[N,8,6,6] x => float[] y, float[] u",
        f"{body}u = Relu(b)\na = Add(z, b)\nr = Transpose<perm=[0,3,1,2]>(a)\ny = Conv(r, w2)",
        {"w1": (8, 8, 3, 3), "bias": (8,), "w2": (4, 8, 1, 1)},
    )
    assert not narrowed_equals_masked(model, feed(model)).blocks
