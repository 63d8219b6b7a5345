"""Layers with both sides in another basis: shifts of normalizations that become their biases, and a stream on both."""

from __future__ import annotations

import numpy as np
import pytest

from onnxgrail.algebra.rotation import basis_of
from onnxgrail.calibration.observe import observe
from onnxgrail.core import Floats, Kind
from onnxgrail.graph.rotate.basis import Rotatable, rotatable, rotate
from onnxgrail.graph.trace.tracer import trace
from tests.oracle import check_same, run
from tests.tiny import feed, ints, tiny
from tests.turned import orthogonal, without

WIDTH, HEADS, SIZE, NARROW = 8, 2, 4, 6


def layers(name: str, width: int, hidden: int = 5) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Two layers without biases, added to `{name}0`, that read it normalized; the sums and a normalized sum."""
    text = ""
    shapes: dict[str, tuple[int, ...]] = {f"{name}g": (width,), f"{name}s": (width,)}
    for i in range(2):
        text += f"""
            {name}n{i} = LayerNormalization(x{name}{i}, {name}g, {name}s)
            {name}u{i} = MatMul({name}n{i}, {name}up{i})
            {name}r{i} = Relu({name}u{i})
            {name}d{i} = MatMul({name}r{i}, {name}down{i})
            x{name}{i + 1} = Add(x{name}{i}, {name}d{i})"""
        shapes |= {f"{name}up{i}": (width, hidden), f"{name}down{i}": (hidden, width)}
    return f"{text}\n{name}end = LayerNormalization(x{name}2, {name}g, {name}s)\n", shapes


ATTENTION = "".join(
    f"{p}1 = MatMul(aend, w{p})\n{p}2 = Reshape({p}1, into)\n{p}3 = Transpose<perm=[{order}]>({p}2)\n"
    for p, order in (("q", "0,2,1,3"), ("k", "0,2,3,1"), ("v", "0,2,1,3"))
)
ATTENTION += """
    scores = MatMul(q3, k3)
    weights = Softmax(scores)
    mixed = MatMul(weights, v3)
    back = Transpose<perm=[0,2,1,3]>(mixed)
    flat = Reshape(back, from)
    y = MatMul(flat, wo)
"""
HEAD = {"wo": (WIDTH, 3)}
READERS = {
    "a linear stream": ("low = MatMul(aend, wlow)\ny = MatMul(low, wo)", {"wlow": (WIDTH, 4), "wo": (4, 3)}),
    "a linear stream of convolutions": (
        "t = Transpose<perm=[0,2,1]>(aend)\nlow = Conv(t, wlow)\ny = Conv(low, wo)",
        {"wlow": (4, WIDTH, 1), "wo": (3, 4, 1)},
    ),
    "a convolution of several taps": (
        "t = Transpose<perm=[0,2,1]>(aend)\ny = Conv<kernel_shape=[2], strides=[2]>(t, taps)",
        {"taps": (3, WIDTH, 2)},
    ),
    "a scaled product": (
        """
        f = Reshape(xa2, rows)
        n = LayerNormalization(f, ag, as)
        low = Gemm<alpha=0.5, beta=2.0>(n, wlow, blow)
        r = Relu(low)
        y = MatMul(r, wo)""",
        {"wlow": (WIDTH, 4), "blow": (4,), "wo": (4, 3), "rows": ints(-1, WIDTH)},
    ),
    "heads": (
        ATTENTION,
        {**{f"w{p}": (WIDTH, WIDTH) for p in "qkvo"}, "into": ints(0, 0, HEADS, SIZE), "from": ints(0, 0, WIDTH)},
    ),
    "the next stream": (
        "xb0 = MatMul(aend, reduce)" + layers("b", NARROW)[0] + "y = MatMul(bend, wo)",
        {"reduce": (WIDTH, NARROW), **layers("b", NARROW)[1], "wo": (NARROW, 3)},
    ),
    "the same stream": (
        "xb3 = MatMul(aend, mix)\nxb4 = Add(xa2, xb3)\nlast = LayerNormalization(xb4, ag, as)\ny = MatMul(last, wo)",
        {"mix": (WIDTH, WIDTH), "wo": (WIDTH, 3)},
    ),
}

ALONE = ("the same stream", "a scaled product", "a convolution of several taps")


def bases_of(found: Rotatable) -> dict[str, Floats]:
    """A random basis for everything that can be turned."""
    rng = np.random.default_rng(1)
    draws = {name: rng.normal(size=(s.width, s.width)) for name, s in found.streams.items()}
    streams = {
        name: (
            basis_of([draws[name] @ draws[name].T], beside_mean=True)
            if s.carries_mean
            else np.linalg.qr(draws[name])[0]
        )
        for name, s in found.streams.items()
    }
    return streams | {n: rng.normal(size=(one.groups, one.width, one.width)) for n, one in found.heads.items()}


@pytest.mark.parametrize("reader", READERS)
def test_a_new_bias_is_in_the_basis_of_what_its_layer_writes(reader: str) -> None:
    end, shapes = READERS[reader]
    model = tiny("float[2,5,6] x => float[] y", f"xa0 = MatMul(x, w){layers('a', WIDTH)[0]}{end}", weights(shapes))
    found = rotatable(model, observe(model, feed(model)), kinds(reader))
    assert len(found.names) == {"heads": 3, **dict.fromkeys(ALONE, 1)}.get(reader, 2)
    check_same(run(rotate(found, bases_of(found)), feed(model)), run(model, feed(model)))


@pytest.mark.parametrize("padding", ["pads=[0,1]", "pads=[1,0]", 'auto_pad="SAME_UPPER"'])
def test_a_padded_convolution_reads_a_matrix_beside_it(padding: str) -> None:
    """It reads zeros at the border, not the shift, so no bias stands for the shift."""
    end = f"t = Transpose<perm=[0,2,1]>(aend)\ny = Conv<kernel_shape=[2], {padding}>(t, taps)"
    text, shapes = layers("a", WIDTH, hidden=40)
    shapes |= {"w": (6, WIDTH), "taps": (3, WIDTH, 2)}
    model = tiny("float[2,5,6] x => float[] y", f"xa0 = MatMul(x, w){text}{end}", shapes)
    found = rotatable(model, observe(model, feed(model)), ("stream",))
    assert len(found.streams) == 1
    other = rotate(found, bases_of(found))
    assert [node.op_type for node in other.graph].count("Conv") == 2
    check_same(run(other, feed(model)), run(model, feed(model)))


@pytest.mark.parametrize("norm", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_a_layer_that_reads_a_stream_as_it_is_sees_its_mean(norm: str) -> None:
    text = layers("a", WIDTH)[0]
    text = text.replace("MatMul(an0", "MatMul(xa0").replace(", as)", ")").replace("LayerNormalization", norm)
    model = tiny(
        "float[2,5,6] x => float[] y", f"xa0 = MatMul(x, w){text}y = MatMul(aend, wo)", weights({"wo": (WIDTH, 3)})
    )
    found = rotatable(model, observe(model, feed(model)), ("stream",))
    (stream,) = found.streams.values()
    assert stream.carries_mean == (norm == "LayerNormalization")
    check_same(run(rotate(found, bases_of(found)), feed(model)), run(model, feed(model)))


@pytest.mark.parametrize("read", ["an0", "xa0"])
def test_a_stream_that_begins_with_a_normalization_is_found_again_with_its_matrix(read: str) -> None:
    """Embeddings that are normalized, then read normalized again (BLOOM, CLIP) or as they are (ModernBERT)."""
    text, shapes = layers("a", WIDTH, hidden=40)
    if read == "xa0":
        text = text.replace("an0 = LayerNormalization(xa0, ag, as)", "").replace("MatMul(an0", "MatMul(xa0")
    start = "e = MatMul(x, w)\nxa0 = LayerNormalization(e, ag, as)"
    model = tiny("float[2,5,6] x => float[] y", f"{start}{text}y = MatMul(aend, wo)", weights(shapes | HEAD))
    found = rotatable(model, observe(model, feed(model)), ("stream",))
    assert [(name, len(stream.norms)) for name, stream in found.streams.items()] == [("an1", 3 if read == "an0" else 2)]
    check_same(run(rotate(found, bases_of(found)), feed(model)), run(model, feed(model)))
    again = rotatable(model, observe(model, feed(model)), ("stream",), list(found.names))
    assert again.names == found.names


def test_a_layer_reads_and_writes_a_linear_stream() -> None:
    text = "h0 = Conv(x, wi)\np = Conv(h0, wm, bm)\nh1 = Add(h0, p)\nc = Conv(h1, wu)\nr = Relu(c)\ny = Conv(r, wo)"
    shapes = {"wi": (8, 3, 1), "wm": (8, 8, 1), "bm": (8,), "wu": (9, 8, 1), "wo": (3, 9, 1)}
    model = tiny("float[2,3,5] x => float[] y", text, shapes)
    found = rotatable(model, observe(model, feed(model)), ("stream",))
    assert [len(stream.slots) for stream in found.streams.values()] == [5]
    other = rotate(found, {name: np.diag(np.arange(1.0, 9)) @ orthogonal(8) for name in found.streams})
    check_same(run(other, feed(model)), run(model, feed(model)))
    survey = trace(other, observe(other, feed(other)))
    slim = run(without(other, survey, 5), feed(model))["y"]
    assert np.abs(slim - run(model, feed(model))["y"]).max() > 1e-2


def kinds(reader: str) -> tuple[Kind, ...]:
    """The kinds of blocks to turn."""
    return ("stream", "qk", "vo") if reader == "heads" else ("stream",)


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """All weights of a model."""
    return {"w": (6, WIDTH), **layers("a", WIDTH)[1], **shapes}
