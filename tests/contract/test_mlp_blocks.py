"""Feed-forward blocks in the spellings of real exports."""

from __future__ import annotations

import pytest

from onnxgrail.core import Array
from tests.oracle import narrowed_equals_masked
from tests.tiny import feed, ints, scalar, tiny

IN, HIDDEN, OUT = 6, 8, 5

ACTIVATIONS = {
    "relu": "z = Relu(h)",
    "erf-gelu": "d = Div(h, root2)\ne = Erf(d)\na = Add(e, one)\nm = Mul(h, a)\nz = Mul(m, half)",
    "tanh-gelu": """c = Pow(h, three)
        d = Mul(c, cubic)
        e = Add(h, d)
        f = Mul(e, root)
        t = Tanh(f)
        a = Add(one, t)
        m = Mul(half, h)
        z = Mul(m, a)""",
    "silu": "s = Sigmoid(h)\nz = Mul(h, s)",
    "quick-gelu": "m = Mul(quick, h)\ns = Sigmoid(m)\nz = Mul(h, s)",
    "squared-relu": "r = Relu(h)\nz = Mul(r, r)",
}
SCALARS: dict[str, Array] = {
    "root2": scalar(1.41421354), "one": scalar(1), "half": scalar(0.5), "three": scalar(3), "cubic": scalar(0.044715),
    "root": scalar(0.797884583), "quick": scalar(1.702),
}  # fmt: skip


@pytest.mark.parametrize("bias", ["bias", "no-bias", "bias-first"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_plain(name: str, bias: str) -> None:
    first = {"bias": "n = MatMul(x, up)\nh = Add(n, b)", "no-bias": "h = MatMul(x, up)"}
    made = first.get(bias, "n = MatMul(x, up)\nh = Add(b, n)")
    used = {k: v for k, v in SCALARS.items() if k in ACTIVATIONS[name]}
    model = tiny(
        "float[N,4,6] x => float[] y",
        f"{made}\n{ACTIVATIONS[name]}\ny = MatMul(z, down)",
        {"up": (IN, HIDDEN), "b": (HIDDEN,), "down": (HIDDEN, OUT), **used},
    )
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert (block.kind, block.units, block.unit_size) == ("mlp", HIDDEN, 1)
    assert [s.initializer for s in block.producers] == ["up"]
    assert [s.initializer for s in block.consumers] == ["down"]
    assert [s.initializer for s in block.slots if s.role == "passenger"] == ([] if bias == "no-bias" else ["b"])


def test_gate_and_up_are_one_group() -> None:
    model = tiny(
        "float[N,4,6] x => float[] y",
        "g = MatMul(x, gate)\ns = Sigmoid(g)\na = Mul(g, s)\nu = MatMul(x, up)\nm = Mul(a, u)\ny = MatMul(m, down)",
        {"gate": (IN, HIDDEN), "up": (IN, HIDDEN), "down": (HIDDEN, OUT)},
    )
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert {s.initializer for s in block.producers} == {"gate", "up"}
    assert (block.kind, block.units) == ("mlp", HIDDEN)


PACKED = {
    "split-num-outputs": ("g, u = Split<axis=-1, num_outputs=2>(h)", {}),
    "split-sizes": ("g, u = Split<axis=2>(h, sizes)", {"sizes": ints(8, 8)}),
    "slices": (
        "g = Slice(h, zero, eight, axis)\nu = Slice(h, eight, end, axis)",
        {"zero": ints(0), "eight": ints(8), "end": ints(2**63 - 1), "axis": ints(-1)},
    ),
    "slices-from-shape": (
        """s = Shape<start=2>(h)
        t = Add(s, one)
        half = Div(t, two)
        whole = Mul(half, two)
        g = Slice(h, zero, half, axis)
        u = Slice(h, half, whole, axis)""",
        {"one": ints(1), "two": ints(2), "zero": ints(0), "axis": ints(2)},
    ),
}


@pytest.mark.parametrize("ratio", [0.3, 0.9])
@pytest.mark.parametrize("name", PACKED)
def test_packed_gate_and_up(name: str, ratio: float) -> None:
    halves, constants = PACKED[name]
    model = tiny(
        "float[N,4,6] x => float[] y",
        f"h = MatMul(x, gate_up)\n{halves}\na = Gelu(g)\nm = Mul(a, u)\ny = MatMul(m, down)",
        {"gate_up": (IN, 2 * HIDDEN), "down": (HIDDEN, OUT), **constants},
    )
    (block,) = narrowed_equals_masked(model, feed(model), ratio).blocks
    assert block.units == HIDDEN
    assert block.producers[0].index.tolist() == [[j, HIDDEN + j] for j in range(HIDDEN)]


FLAT = {
    "opt": (
        """f = Reshape(x, flat)
        a = Gemm<transB=1>(f, up, b)
        r = Relu(a)
        c = Gemm<transB=1>(r, down, d)
        s = Shape<end=2>(x)
        t = Concat<axis=0>(s, width)
        y = Reshape(c, t)""",
        {"up": (HIDDEN, IN), "down": (OUT, HIDDEN), "width": ints(OUT)},
    ),
    "gpt2": (
        """f = Reshape(x, flat)
        a = Gemm(f, up, b)
        s = Shape<end=2>(x)
        i = Concat<axis=0>(s, hidden)
        h = Reshape(a, i)
        r = Gelu(h)
        j = Reshape(r, flat_hidden)
        c = Gemm(j, down, d)
        t = Concat<axis=0>(s, width)
        y = Reshape(c, t)""",
        {
            "up": (IN, HIDDEN), "down": (HIDDEN, OUT), "hidden": ints(HIDDEN), "flat_hidden": ints(-1, HIDDEN),
            "width": ints(OUT),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAT)
def test_flattened(name: str) -> None:
    body, weights = FLAT[name]
    model = tiny("float[N,4,6] x => float[] y", body, {"b": (HIDDEN,), "d": (OUT,), "flat": ints(-1, IN), **weights})
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert (block.kind, block.units, len(block.consumers)) == ("mlp", HIDDEN, 1)


def test_convolution_between_the_matrices() -> None:
    """SegFormer's MixFFN: the hidden width leaves the last axis and comes back."""
    model = tiny(
        "float[N,4,6] x => float[] y",
        """a = MatMul(x, up)
        t = Transpose<perm=[0,2,1]>(a)
        r = Reshape(t, image)
        c = Conv<group=8, pads=[1,1,1,1]>(r, k, b)
        f = Reshape(c, tokens)
        u = Transpose<perm=[0,2,1]>(f)
        g = Gelu(u)
        y = MatMul(g, down)""",
        {
            "up": (IN, HIDDEN), "k": (HIDDEN, 1, 3, 3), "b": (HIDDEN,), "down": (HIDDEN, OUT),
            "image": ints(-1, HIDDEN, 2, 2), "tokens": ints(-1, HIDDEN, 4),
        },
    )  # fmt: skip
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert block.units == HIDDEN


def test_mixing_over_tokens() -> None:
    model = tiny(
        "float[N,4,6] x => float[] y",
        """t = Transpose<perm=[0,2,1]>(x)
        a = MatMul(t, up)
        g = Gelu(a)
        b = MatMul(g, down)
        y = Transpose<perm=[0,2,1]>(b)""",
        {"up": (4, HIDDEN), "down": (HIDDEN, 4)},
    )
    (block,) = narrowed_equals_masked(model, feed(model)).blocks
    assert (block.kind, block.units) == ("mlp", HIDDEN)


def test_parallel_layers_share_their_input_and_not_their_width() -> None:
    model = tiny(
        "float[N,4,6] x => float[] y",
        "a = MatMul(x, u1)\nb = Relu(a)\nc = MatMul(b, d1)\nd = MatMul(x, u2)\ne = Relu(d)\n"
        "f = MatMul(e, d2)\ny = Add(c, f)",
        {"u1": (IN, HIDDEN), "d1": (HIDDEN, OUT), "u2": (IN, 7), "d2": (7, OUT)},
    )
    survey = narrowed_equals_masked(model, feed(model))
    assert sorted(b.units for b in survey.blocks) == [7, HIDDEN]


def test_a_layer_with_one_channel_says_so() -> None:
    """Of one channel there is nothing that could depend on each other."""
    body = "a = MatMul(x, up)\nr = Relu(a)\ng = MatMul(r, gate)\ns = Sigmoid(g)\ny = MatMul(s, out)"
    model = tiny("float[N,6] x => float[] y", body, {"up": (6, 8), "gate": (8, 1), "out": (1, 3)})
    survey = narrowed_equals_masked(model, feed(model))
    assert [r.reason for r in survey.refusals if r.value == "gate"] == ["there is only one channel, and one must stay"]
