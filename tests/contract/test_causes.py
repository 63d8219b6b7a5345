"""Refusals name what made one unit of the channels, not where that was noticed."""

from __future__ import annotations

import onnx_ir as ir

from onnxgrail.core import Refusal
from tests.oracle import narrowed_equals_masked
from tests.tiny import feed, ints, shuffled, tiny


def reasons(model: ir.Model) -> dict[str, Refusal]:
    return {r.value: r for r in narrowed_equals_masked(model, feed(model)).refusals}


def test_a_product_of_two_activations() -> None:
    """DLRM: every pair of features is multiplied, and the products lie beside one of the features."""
    model = tiny(
        "float[N,6] x, int64[N] ids => float[] y",
        """a = MatMul(x, w0)
        e = Gather(table, ids)
        c = Concat<axis=1>(a, e)
        f = Reshape(c, apart)
        t = Transpose<perm=[0,2,1]>(f)
        p = MatMul(f, t)
        q = Reshape(p, flat)
        z = Concat<axis=1>(a, q)
        y = MatMul(z, w1)""",
        {"w0": (6, 8), "table": (7, 8), "apart": ints(-1, 2, 8), "flat": ints(-1, 4), "w1": (12, 5)},
    )
    found = reasons(model)
    for name in ("w0", "table"):
        assert "product of two activations" in found[name].reason
        assert found[name].op == "MatMul"


def test_groups_then_a_shuffle() -> None:
    """ShuffleNet of 2017, with as many groups as a group has channels, and a shortcut around both."""
    model = shuffled(8, 4, "z = Add(s1, h)")
    found = reasons(model)["w0"]
    assert "groups, then a shuffle" in found.reason
    assert found.op == "Conv"


def test_channels_that_are_one_unit() -> None:
    """Each channel is added to the next one, so that all depend on each other; a single channel is another matter."""
    model = tiny(
        "float[N,6] x => float[] y, float[] z",
        "a = MatMul(x, w0)\nb = Slice(a, zero, last, one)\nc = Slice(a, one, end, one)\nd = Add(b, c)\n"
        "y = MatMul(d, w1)\ne = MatMul(x, v0)\nf = Relu(e)\nz = MatMul(f, v1)",
        {"w0": (6, 8), "w1": (7, 5), "v0": (6, 1), "v1": (1, 5)}
        | {"zero": ints(0), "one": ints(1), "last": ints(7), "end": ints(8)},
    )
    found = reasons(model)
    assert found["w0"].reason == "all positions depend on each other, so none can go alone"
    assert found["v0"].reason == "there is only one channel, and one must stay"


def test_modulated_weights() -> None:
    """StyleGAN: a style scales the filters of each sample, and their norm is divided out."""
    model = tiny(
        "float[2,4,5,5] x, float[2,3] style => float[] y",
        """s = MatMul(style, w0)
        s5 = Reshape(s, five)
        m = Mul(filters, s5)
        q = Mul(m, m)
        n = ReduceSum(q, axes)
        r = Sqrt(n)
        d = Div(m, r)
        k = Reshape(d, four)
        x1 = Reshape(x, flat)
        c = Conv<group=2>(x1, k)
        y = Reshape(c, back)""",
        {
            "w0": (3, 4),
            "filters": (1, 6, 4, 1, 1),
            "five": ints(2, 1, 4, 1, 1),
            "axes": ints(2, 3, 4),
            "four": ints(12, 4, 1, 1),
            "flat": ints(1, 8, 5, 5),
            "back": ints(2, 6, 5, 5),
        },
    )
    assert "modulated weights: the filters of Conv" in reasons(model)["w0"].reason


def test_a_refusal_that_names_its_cause_stays() -> None:
    """A norm is where channels become one, and it says so."""
    model = tiny(
        "float[N,6] x => float[] y",
        "a = MatMul(x, w0)\nb = LayerNormalization(a, s)\ny = MatMul(b, w1)",
        {"w0": (6, 8), "s": (8,), "w1": (8, 5)},
    )
    assert "mixes the whole channel axis" in reasons(model)["w0"].reason
