"""Convolutional blocks in the spellings of real exports."""

from __future__ import annotations

import numpy as np

from onnxgrail.core import Block
from onnxgrail.graph.trace.survey import Survey
from tests.oracle import narrowed_equals_masked
from tests.tiny import batch_norm, cnn, feed, ints, tiny


def only(survey: Survey) -> Block:
    (block,) = survey.blocks
    return block


def of(survey: Survey, producer: str) -> Block:
    """The block that a weight makes."""
    (block,) = [b for b in survey.blocks if producer in {s.initializer for s in b.producers}]
    return block


def test_chain_with_batch_norm_kept() -> None:
    model = cnn((8, 6))
    survey = narrowed_equals_masked(model, feed(model))
    first, second = survey.blocks
    assert [(b.kind, b.units, b.unit_size) for b in (first, second)] == [("conv", 8, 1), ("conv", 6, 1)]
    assert {s.initializer for s in first.slots if s.role == "passenger"} == {"b0", "s0", "t0", "u0", "v0"}
    assert [(s.initializer, s.axis) for s in first.consumers] == [("w1", 1)]
    assert [(s.initializer, s.axis, s.index.shape) for s in second.consumers] == [("g", 0, (6, 9))]
    assert second.probes[0].pooled
    assert not first.probes[0].pooled


def test_flatten_by_reshape_with_the_width_baked_in() -> None:
    model = tiny(
        "float[N,3,7,7] x => float[] y",
        "h = Conv(x, w, b)\nr = Relu(h)\nf = Reshape<allowzero=1>(r, s)\ny = Gemm<transB=1>(f, v, c)",
        {"w": (6, 3, 1, 1), "b": (6,), "s": ints(-1, 6 * 49), "v": (5, 6 * 49), "c": (5,)},
    )
    block = only(narrowed_equals_masked(model, feed(model)))
    assert (block.kind, block.units) == ("conv", 6)
    assert np.array_equal(block.consumers[0].index, np.arange(6 * 49).reshape(6, 49))


def test_residual_add_couples_its_producers() -> None:
    model = tiny(
        "float[N,3,4,4] x => float[] y",
        """a = Conv(x, w0)
        b = Relu(a)
        c = Conv(b, w1)
        d = Relu(c)
        e = Conv(d, w2)
        f = Add(a, e)
        g = Relu(f)
        y = Conv(g, w3)""",
        {"w0": (8, 3, 1, 1), "w1": (6, 8, 1, 1), "w2": (8, 6, 1, 1), "w3": (4, 8, 1, 1)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert sorted((b.kind, b.units) for b in survey.blocks) == [("conv", 6), ("stream", 8)]
    stream = of(survey, "w0")
    assert {s.initializer for s in stream.producers} == {"w0", "w2"}
    assert {s.initializer for s in stream.consumers} == {"w1", "w3"}
    narrowed_equals_masked(model, feed(model), kinds=["conv"])


def test_squeeze_and_excite_in_an_inverted_bottleneck() -> None:
    model = tiny(
        "float[N,3,4,4] x => float[] y",
        """a = Conv(x, w0, b0)
        b = HardSwish(a)
        c = Conv<group=8, pads=[1,1,1,1]>(b, w1, b1)
        d = Sigmoid(c)
        e = Mul(c, d)
        p = ReduceMean<keepdims=1>(e, axes)
        q = Conv(p, w2, b2)
        r = Relu(q)
        s = Conv(r, w3, b3)
        t = HardSigmoid(s)
        u = Mul(t, e)
        y = Conv(u, w4)""",
        {
            "w0": (8, 3, 1, 1),
            "b0": (8,),
            "w1": (8, 1, 3, 3),
            "b1": (8,),
            "w2": (4, 8, 1, 1),
            "b2": (4,),
            "w3": (8, 4, 1, 1),
            "b3": (8,),
            "w4": (5, 8, 1, 1),
            "axes": ints(-1, -2),
        },
        seed=3,
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert sorted((b.kind, b.units) for b in survey.blocks) == [("conv", 4), ("conv", 8)]
    assert {s.initializer for s in of(survey, "w0").producers} == {"w0", "w3"}


def test_dense_concatenation_before_batch_norm() -> None:
    model = tiny(
        "float[N,3,4,4] x => float[] y",
        """a = Conv(x, w0)
        b = Conv(a, w1)
        c = Concat<axis=1>(x, a, b)
        d = BatchNormalization(c, s, t, u, v)
        e = Relu(d)
        y = Conv(e, w2)""",
        {"w0": (6, 3, 1, 1), "w1": (4, 6, 1, 1), "w2": (5, 13, 1, 1), **batch_norm("stuv", 13)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert sorted(b.units for b in survey.blocks) == [4, 6]
    slots = {s.initializer: s.index.ravel().tolist() for s in of(survey, "w1").slots}
    assert slots["s"] == slots["w2"] == [9, 10, 11, 12]


def test_channel_shuffle_keeps_inner_branches() -> None:
    model = tiny(
        "float[N,4,4,4] x => float[] y",
        """a = Conv(x, w0)
        b = Conv(x, w1)
        c = Concat<axis=1>(a, b)
        d = Reshape(c, split)
        e = Transpose<perm=[0,2,1,3,4]>(d)
        f = Reshape(e, merged)
        g, h = Split<axis=1, num_outputs=2>(f)
        i = Conv(h, w2)
        j = Relu(i)
        k = Conv(j, w3)
        y = Concat<axis=1>(g, k)""",
        {
            "w0": (4, 4, 1, 1),
            "w1": (4, 4, 1, 1),
            "w2": (6, 4, 1, 1),
            "w3": (4, 6, 1, 1),
            "split": ints(-1, 2, 4, 4, 4),
            "merged": ints(-1, 8, 4, 4),
        },
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert 6 in {b.units for b in survey.blocks}
    assert any(r.op == "output" for r in survey.refusals)


def test_shuffle_of_a_half_that_must_stay_stops() -> None:
    """Half of every interleaved pair is permanent: the other half cannot go without breaking the box."""
    model = tiny(
        "float[N,3,4,4] x => float[] y",
        """a = Conv(x, w0)
        c = Concat<axis=1>(a, x)
        d = Reshape(c, split)
        e = Transpose<perm=[0,2,1,3,4]>(d)
        f = Reshape(e, merged)
        g = GlobalAveragePool(f)
        h = Flatten(g)
        y = MatMul(h, w1)""",
        {"w0": (3, 3, 1, 1), "w1": (6, 4), "split": ints(-1, 2, 3, 4, 4), "merged": ints(-1, 6, 4, 4)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert not survey.blocks
    assert any(r.value == "w0" and "rectangular" in r.reason for r in survey.refusals)


def test_unet_with_skip_and_computed_sizes() -> None:
    model = tiny(
        "float[N,3,H,W] x => float[] y",
        """a = Conv<pads=[1,1,1,1]>(x, w0)
        b = MaxPool<kernel_shape=[2,2], strides=[2,2]>(a)
        c = Conv(b, w1)
        d = Relu(c)
        n = Shape<end=1>(x)
        hw = Shape<start=2>(a)
        sizes = Concat<axis=0>(n, eight, hw)
        up = Resize<mode="nearest">(d, , , sizes)
        e = Concat<axis=1>(up, a)
        f = ConvTranspose<strides=[2,2]>(e, w2, b2)
        g = DepthToSpace<blocksize=2, mode="CRD">(f)
        y = Conv(g, w3)""",
        {
            "w0": (6, 3, 3, 3),
            "w1": (8, 6, 1, 1),
            "w2": (14, 12, 2, 2),
            "b2": (12,),
            "w3": (2, 3, 1, 1),
            "eight": ints(8),
        },
    )
    survey = narrowed_equals_masked(model, feed(model, H=6, W=8))
    assert sorted(b.units for b in survey.blocks) == [3, 6, 8]
    assert of(survey, "w2").producers[0].index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_split_and_concatenate_again() -> None:
    """YOLO's C2f: both halves keep sizes of their own."""
    model = tiny(
        "float[N,3,4,4] x => float[] y",
        """a = Conv(x, w0)
        p, q = Split<axis=1>(a, halves)
        b = Conv(q, w1)
        c = Add(q, b)
        d = Concat<axis=1>(p, q, c)
        y = Conv(d, w2)""",
        {"w0": (8, 3, 1, 1), "w1": (4, 4, 1, 1), "w2": (5, 12, 1, 1), "halves": ints(4, 4)},
    )
    survey = narrowed_equals_masked(model, feed(model), 0.3)
    assert sorted((b.kind, b.units) for b in survey.blocks) == [("conv", 4), ("stream", 4)]


def test_groups_of_a_convolution_behind_a_norm_with_groups() -> None:
    model = tiny(
        "float[N,3,4,4] x => float[] y",
        """a = Conv(x, w0)
        r = Reshape(a, split)
        n = InstanceNormalization(r, ones, zeros)
        m = Reshape(n, merged)
        s = Mul(m, gamma)
        t = Add(s, beta)
        u = Conv<group=2>(t, w1)
        y = Conv(u, w2)""",
        {
            "w0": (12, 3, 1, 1),
            "w1": (6, 6, 1, 1),
            "w2": (5, 6, 1, 1),
            "split": ints(0, 4, -1),
            "ones": np.ones(4, np.float32),
            "zeros": np.zeros(4, np.float32),
            "merged": ints(-1, 12, 4, 4),
            "gamma": (12, 1, 1),
            "beta": (1, 12, 1, 1),
        },
    )
    block = only(narrowed_equals_masked(model, feed(model)))
    assert block.units == 2
    assert {s.initializer: s.index.shape for s in block.slots}["ones"] == (2, 2)


def test_two_producers_of_one_feature_map() -> None:
    """A time embedding: a Gemm makes the same channels as the convolution it is added to."""
    model = tiny(
        "float[N,3,4,4] x, float[N,5] t => float[] y",
        """a = Conv(x, w0)
        e = Gemm<transB=1>(t, w1, b1)
        f = Unsqueeze(e, space)
        g = Add(a, f)
        h = Sigmoid(g)
        i = Mul(g, h)
        y = Conv(i, w2)""",
        {"w0": (8, 3, 1, 1), "w1": (8, 5), "b1": (8,), "w2": (4, 8, 1, 1), "space": ints(2, 3)},
    )
    block = only(narrowed_equals_masked(model, feed(model)))
    assert {s.initializer for s in block.producers} == {"w0", "w1"}
    assert block.units == 8


def test_channels_last_stage() -> None:
    """ConvNeXt: norm over the channels fixes the stream, the hidden width goes."""
    model = tiny(
        "float[N,3,4,4] x => float[] y",
        """a = Conv(x, w0)
        b = Conv<group=8, pads=[1,1,1,1]>(a, w1)
        c = Transpose<perm=[0,2,3,1]>(b)
        d = LayerNormalization(c, gamma, beta)
        e = MatMul(d, w2)
        f = Gelu(e)
        g = MatMul(f, w3)
        h = Transpose<perm=[0,3,1,2]>(g)
        i = Mul(h, scale)
        y = Add(a, i)""",
        {
            "w0": (8, 3, 1, 1),
            "w1": (8, 1, 3, 3),
            "gamma": (8,),
            "beta": (8,),
            "w2": (8, 12),
            "w3": (12, 8),
            "scale": (8, 1, 1),
        },
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert [(b.kind, b.units) for b in survey.blocks] == [("mlp", 12)]
    assert any(r.value == "w0" and r.op == "LayerNormalization" for r in survey.refusals)
