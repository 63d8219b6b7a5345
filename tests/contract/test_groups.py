"""Grouped convolutions: whole groups, or as many channels of each."""

from __future__ import annotations

import numpy as np
import pytest

import onnxgrail
from tests.contract.test_conv_blocks import only
from tests.oracle import narrowed_equals_masked, run
from tests.tiny import feed, ints, lines, tiny


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
    layer = """g$i = Conv<group=4>($x, k$i)
        r$i = Reshape(g$i, apart)
        t$i = Transpose<perm=[0,2,1,3,4]>(r$i)
        s$i = Reshape(t$i, back)
        """
    model = tiny(
        "float[N,3,4,4] x => float[] y",
        f"h = Conv(x, w0)\n{lines(layer, i=0, x='h')}{lines(layer, i=1, x='s0')}{end}\ny = Conv(z, w1)",
        {
            "w0": (16, 3, 1, 1),
            "k0": (16, 4, 1, 1),
            "k1": (16, 4, 1, 1),
            "apart": ints(-1, 4, 4, 4, 4),
            "back": ints(-1, 16, 4, 4),
            "w1": (5, 16, 1, 1),
        },
    )
    for ratio in (0.3, 0.6):
        survey = narrowed_equals_masked(model, feed(model), ratio)
        assert [block.units for block in survey.blocks] == ([4] if "Add" in end else [4, 4])


@pytest.mark.parametrize("groups", [(4, 1), (4, 2), (4, 4), (16, 1)], ids=str)
def test_narrow_groups_of_channels_that_stay(groups: tuple[int, int]) -> None:
    """No group can go, but as many channels of each; with one channel per group, as many as it is multiplied by."""
    first, second = groups
    model = tiny(
        "float[N,16,4,4] x => float[] y",
        f"a = Conv<group={first}>(x, w0)\nb = Relu(a)\ny = Conv<group={second}>(b, w1)",
        {"w0": (48, 16 // first, 1, 1), "w1": (4, 48 // second, 1, 1)},
    )
    assert only(narrowed_equals_masked(model, feed(model))).units == 48 // first


def test_groups_of_channels_that_stay() -> None:
    """The inputs of a grouped convolution are those of the model; what it makes can be narrowed."""
    model = tiny(
        "float[N,16,4,4] x => float[] y",
        "a = Conv<group=2>(x, w0)\nb = Relu(a)\ny = Conv(b, w1)",
        {"w0": (16, 8, 1, 1), "w1": (5, 16, 1, 1)},
    )
    assert only(narrowed_equals_masked(model, feed(model))).units == 8
