"""Grouped convolutions: whole groups, or as many channels of each."""

from __future__ import annotations

import numpy as np
import pytest

import onnxgrail
from tests.contract.test_conv_blocks import only
from tests.oracle import narrowed_equals_masked, run
from tests.tiny import feed, ints, shuffled, tiny


def test_few_wide_groups_keep_equally_many_channels() -> None:
    """Two grouped convolutions with a shuffle between them (ShuffleNet, SINet), and halves that are concatenated."""
    model = tiny(
        "float[N,3,4,4] x => float[] y",
        """a = Conv(x, w0)
        b = Relu(a)
        c = Conv<group=2>(b, w1, bias)
        r = Reshape(c, apart)
        t = Transpose<perm=[0,2,1,3,4]>(r)
        d = Reshape(t, back)
        e = Conv<group=2, pads=[1,1,1,1]>(d, w2)
        f = Relu(e)
        y = Conv(f, w3)""",
        {
            "w0": (16, 3, 1, 1),
            "w1": (24, 8, 1, 1),
            "bias": (24,),
            "w2": (20, 12, 3, 3),
            "w3": (5, 20, 1, 1),
            "apart": ints(0, 2, 12, 4, 4),
            "back": ints(0, 24, 4, 4),
        },
    )
    for ratio in (0.3, 0.9):
        survey = narrowed_equals_masked(model, feed(model), ratio)
        assert sorted(block.units for block in survey.blocks) == [6, 8, 10]
        assert not [refusal for refusal in survey.refusals if refusal.op != "output"]
    images = np.random.default_rng(0).normal(size=(48, 3, 4, 4)).astype(np.float32)
    lost = {}
    for compensate in ("none", "grail", "best"):
        slim = onnxgrail.compress(model, data={"x": images}, ratio=0.3, compensate=compensate, round_to=1).model
        lost[compensate] = np.square(run(slim, {"x": images})["y"] - run(model, {"x": images})["y"]).sum()
        assert [node.attributes.get_int("group", 1) for node in slim.graph if node.op_type == "Conv"] == [1, 2, 2, 1]
    assert lost["best"] < lost["grail"] < lost["none"]


@pytest.mark.parametrize("end", ["z = Add(s1, h)", "z = Relu(s1)"], ids=["a shortcut", "no shortcut"])
def test_narrow_groups_with_shuffles(end: str) -> None:
    """ShuffleNet of 2017: every group of a convolution reads the same share of each group of the one before."""
    model = shuffled(16, 4, end)
    for ratio in (0.3, 0.6):
        survey = narrowed_equals_masked(model, feed(model), ratio)
        assert [block.units for block in survey.blocks] == ([4] if "Add" in end else [4, 4])


@pytest.mark.parametrize(
    ("made", "first", "second"), [(16, 2, 1), (48, 4, 1), (48, 4, 2), (48, 4, 4), (48, 16, 1)], ids=str
)
def test_groups_of_channels_that_stay(made: int, first: int, second: int) -> None:
    """The inputs are those of the model, so no group can go; what it makes can, as much in each group.

    With one channel per group, a group makes as many channels as the input is multiplied by.
    """
    model = tiny(
        "float[N,16,4,4] x => float[] y",
        f"a = Conv<group={first}>(x, w0)\nb = Relu(a)\ny = Conv<group={second}>(b, w1)",
        {"w0": (made, 16 // first, 1, 1), "w1": (4, made // second, 1, 1)},
    )
    assert only(narrowed_equals_masked(model, feed(model))).units == made // first
